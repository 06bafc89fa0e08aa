#include <ATen/ATen.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "device/host_device.h"
#include "engine/engine_options.h"
#include "kvswap/engine_fields.h"
#include "torch/engine_calls.h"
#include "torch/session.h"
#include "torch/torch_device.h"

namespace kvswap {
namespace {

/// Where pages and tensors live; none: on the CPU.
std::optional<DeviceKind> device_kind(const std::string& name) {
  if (name == "cpu") return std::nullopt;
  if (name == "host") return host_device({});
  const at::Device device(name);
  TORCH_CHECK_VALUE(device.is_cuda(), "session: device must be cpu or a CUDA device, got '", name,
                    "'");
  return cuda_device_kind(device.has_index() ? device.index() : 0);
}

}  // namespace

EngineOptions engine_options(const SessionOptions& from) {
  EngineOptions to;
  to.layers = from.layers;
  to.heads = from.heads;
  to.kv_heads = from.kv_heads;
  to.head_dim = from.head_dim;
  to.dtype = engine_dtype(from.dtype);
  to.file.directory = from.directory;
  try {
    copy_engine_fields(from, to);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  to.file.quota_bytes = from.disk_quota_bytes;
  to.device_model = from.device_model;
  to.ranks = from.ranks.size() == 1 ? std::vector<int64_t>(from.layers, from.ranks[0]) : from.ranks;
  to.kv_memory_bytes = from.kv_memory_bytes;
  to.max_context = from.max_context;
  to.max_batch = from.max_batch;
  to.timeline_spans = from.timeline_spans;
  to.device = device_kind(from.device);
  return to;
}

}  // namespace kvswap
