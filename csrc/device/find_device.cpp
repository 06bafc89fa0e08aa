#include "device/find_device.h"

#include "device/host_device.h"

namespace kvswap {
namespace {

FindCuda& find_cuda() {
  static FindCuda find = nullptr;
  return find;
}

}  // namespace

void set_find_cuda(FindCuda find) { find_cuda() = find; }

Result<std::optional<DeviceKind>> find_device(const std::string& name) {
  if (name == "cpu") return std::optional<DeviceKind>();
  if (name == "host") return std::optional<DeviceKind>(host_device({}));
  if (!name.starts_with("cuda")) {
    return Status::invalid("session: device must be cpu or a CUDA device, got '" + name + "'");
  }
  if (find_cuda() != nullptr) return find_cuda()(name);
  return Status::invalid(
      "session: device must be cpu, since this build has no CUDA; build kvswap_torch where nvcc "
      "and "
      "a torch with CUDA are, or move the model to the CPU");
}

}  // namespace kvswap
