#include "methods/selection/selector_factory.h"

#include "methods/clusters/cluster_selector.h"
#include "methods/selection/device_selector.h"
#include "methods/selection/host_fallback_selector.h"
#include "methods/selection/summary_selector.h"

namespace kvswap {

std::unique_ptr<Selector> make_selector(const MethodOptions& options, Device* device) {
  const SummaryKind* kind = SummaryKind::find(options.rows);
  KVSWAP_ASSERT(kind != nullptr);
  if (kind->is_of_clusters) {
    KVSWAP_ASSERT(device == nullptr);
    return std::make_unique<ClusterSelector>(options);
  }
  if (device != nullptr && has_device_kernels(options)) {
    return std::make_unique<DeviceSelector>(*device, *kind, options);
  }
  auto memory = make_host_summary_memory();
  auto rows = kind->make(options, memory);
  if (device != nullptr) {
    return std::make_unique<HostFallbackSelector>(*device, options, std::move(rows), memory);
  }
  return std::make_unique<SummarySelector>(options, std::move(rows), memory);
}

}  // namespace kvswap
