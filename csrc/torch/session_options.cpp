#include <ATen/ATen.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "device/host_device.h"
#include "runtime/engine_options.h"
#include "torch/engine_calls.h"
#include "torch/session.h"
#include "torch/torch_device.h"

namespace kvswap {
namespace {

template <typename T>
T parse(const char* field, const std::string& value,
        std::initializer_list<std::pair<const char*, T>> names) {
  std::string known;
  for (const auto& [name, parsed] : names) {
    if (value == name) return parsed;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  TORCH_CHECK_VALUE(false, "session: ", field, " must be one of ", known, ", got '", value, "'");
}

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
  to.file.mode = parse<IoMode>(
      "io_mode", from.io_mode,
      {{"auto", IoMode::kAuto}, {"direct", IoMode::kDirect}, {"buffered", IoMode::kBuffered}});
  to.file.quota_bytes = from.disk_quota_bytes;
  to.reader.kind = parse<ReaderKind>("reader", from.reader,
                                     {{"auto", ReaderKind::kAuto},
                                      {"uring", ReaderKind::kUring},
                                      {"threads", ReaderKind::kThreads},
                                      {"sync", ReaderKind::kSync}});
  to.reader.depth = static_cast<int>(from.read_depth);
  to.device_model = from.device_model;
  to.merge_gap_bytes = from.merge_gap_bytes;
  to.merge_bytes_max = from.merge_bytes_max;
  to.checksum = from.checksum;
  to.group_tokens = from.group_tokens;
  to.ranks = from.ranks.size() == 1 ? std::vector<int64_t>(from.layers, from.ranks[0]) : from.ranks;
  to.summary_dtype = parse<DType>("summary_dtype", from.summary_dtype,
                                  {{"model", to.dtype}, {"int8", DType::kInt8}});
  to.groups_max = from.groups_max;
  to.pages_max = from.pages_max;
  to.sink_tokens = from.sink_tokens;
  to.tail_tokens = from.tail_tokens;
  to.replacement = parse<Replacement>("replacement", from.replacement,
                                      {{"fifo", Replacement::kFifo},
                                       {"lru", Replacement::kLru},
                                       {"unused", Replacement::kUnused},
                                       {"none", Replacement::kNone}});
  to.select_queries_max = from.select_queries_max;
  to.kv_memory_bytes = from.kv_memory_bytes;
  to.max_context = from.max_context;
  to.max_batch = from.max_batch;
  to.timeline_spans = from.timeline_spans;
  to.device = device_kind(from.device);
  return to;
}

}  // namespace kvswap
