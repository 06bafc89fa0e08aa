#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "device/device.h"
#include "methods/selection/summary_selector.h"

namespace kvswap {

/// Rows on the host of keys on a device: for rows that have no device kernels yet. Sealed keys and
/// queries are copied to the host, into memory that the device has pinned, and the caller waits for
/// both copies: slower, on any device.
///
/// What stands without gaps, in whatever order of heads and tokens, is one copy; what does not, one
/// for each part that does.
class HostFallbackSelector final : public SummarySelector {
 public:
  HostFallbackSelector(Device& device, const MethodOptions& options,
                       std::unique_ptr<SummaryEncoder> rows, std::shared_ptr<SummaryMemory> memory)
      : SummarySelector(options, std::move(rows), std::move(memory)), device_(device) {}
  ~HostFallbackSelector() override;

  Status reserve(const SelectionPlace& place) override;
  using SummarySelector::append;
  Status append(std::span<const SealedKeys> sealed) override;
  Status start_choice(const ChooseArgs& args) override;
  double wait_seconds() const override { return wait_seconds_; }

  // Bytes of the host that copies take: of keys, and of one sequence's queries.
  static int64_t key_bytes(const MethodOptions& options);
  static int64_t query_bytes(const MethodOptions& options, int64_t queries);

 private:
  struct Dimension {
    int64_t count = 1;
    int64_t stride = 0;  // elements
  };
  Status append_copy(const SealedKeys& sealed);
  Status make_room(int64_t bytes);
  void copy_out(const std::byte* from, DType dtype, std::span<Dimension> dimensions);
  Status wait();

  Device& device_;
  struct Free {
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Free> copy_;
  int64_t copy_bytes_ = 0;
  Event copied_ = -1;
  double wait_seconds_ = 0;
};

}  // namespace kvswap
