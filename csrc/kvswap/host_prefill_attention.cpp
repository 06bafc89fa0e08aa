#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "kvswap/host_prefill_block.h"
#include "kvswap/prefill_attention.h"

namespace kvswap {
namespace {

/// Elements that a strided array [batch, heads, tokens, width] reaches over.
struct Reach {
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t width;

  int64_t elements(int64_t batch_stride, int64_t head_stride, int64_t token_stride) const {
    return (batch - 1) * batch_stride + (heads - 1) * head_stride + (tokens - 1) * token_stride +
           width;
  }
};

/// A chunk's arrays, in memory of the host.
class HostChunk final : public ExactChunk {
 public:
  HostChunk(Engine& engine, const ExactArgs& args)
      : engine_(engine), args_(args), query_(args.attention.query), own_(args.own) {}

  /// On a device, copies them there; their strides stay.
  Status fetch() {
    const EngineOptions& options = engine_.options();
    output_ = static_cast<std::byte*>(args_.attention.output);
    const int64_t value_width = options.record_shape().value_width();
    output_bytes_ =
        engine_.batch() * query_.queries * query_.heads * value_width * dtype_bytes(options.dtype);
    sinks_ = args_.attention.sinks;
    if (!options.device) return Status::ok();
    if (sinks_ != nullptr) {
      sinks_copy_.resize(query_.heads);
      KVSWAP_RETURN_IF_ERROR(engine_.context().space->compute().download(
          reinterpret_cast<std::byte*>(sinks_copy_.data()),
          reinterpret_cast<const std::byte*>(sinks_), query_.heads * int64_t{sizeof(float)}));
      sinks_ = sinks_copy_.data();
    }
    output_copy_.resize(output_bytes_);
    output_ = output_copy_.data();
    const Reach asked = {engine_.batch(), query_.heads, query_.queries, options.head_dim};
    KVSWAP_RETURN_IF_ERROR(
        download(asked.elements(query_.batch_stride, query_.head_stride, query_.query_stride),
                 query_.data, query_copy_));
    query_.data = query_copy_.data();
    if (args_.is_own_host) return Status::ok();
    const Reach own = {engine_.batch(), options.kv_heads, query_.queries, options.head_dim};
    KVSWAP_RETURN_IF_ERROR(
        download(own.elements(own_.key_batch_stride, own_.key_head_stride, own_.key_token_stride),
                 own_.keys, keys_copy_));
    own_.keys = keys_copy_.data();
    const Reach values = {engine_.batch(), options.kv_heads, query_.queries, value_width};
    KVSWAP_RETURN_IF_ERROR(download(
        values.elements(own_.value_batch_stride, own_.value_head_stride, own_.value_token_stride),
        own_.values, values_copy_));
    own_.values = values_copy_.data();
    return Status::ok();
  }

  bool attend_alone() override {
    for (int64_t part = 0; part < engine_.sequences().size(); ++part) {
      attend_part_alone(engine_, part, view(part, 0), args_.attention);
    }
    return true;
  }
  void clear() override { std::fill_n(output_, output_bytes_, std::byte{0}); }

  std::unique_ptr<ExactPart> part(int64_t part, int64_t begin) override {
    return host_part(engine_, part, view(part, begin), args_.attention);
  }

  Status finish() override {
    if (output_copy_.empty()) return Status::ok();
    return engine_.context().space->compute().upload(
        static_cast<std::byte*>(args_.attention.output), output_copy_.data(), output_bytes_);
  }

 private:
  Status download(int64_t elements, const void* from, std::vector<std::byte>& to) {
    to.resize(elements * dtype_bytes(engine_.options().dtype));
    return engine_.context().space->compute().download(
        to.data(), static_cast<const std::byte*>(from), static_cast<int64_t>(to.size()));
  }

  PartView view(int64_t part, int64_t begin) const {
    const EngineOptions& options = engine_.options();
    const int64_t apart = engine_.context().options.heads_apart;
    const int64_t element = dtype_bytes(options.dtype);
    const int64_t row = query_.heads * options.record_shape().value_width();
    QueryView query = query_.of_parts(apart);
    query.data = query.at(part, 0, begin);
    query.queries -= begin;
    query.heads_apart = 1;
    const int64_t sequence = part / apart;
    const int64_t head = part % apart;
    KeyValueView own = own_;
    own.keys = static_cast<const std::byte*>(own_.keys) +
               element * (sequence * own_.key_batch_stride + head * own_.key_head_stride +
                          begin * own_.key_token_stride);
    own.values = static_cast<const std::byte*>(own_.values) +
                 element * (sequence * own_.value_batch_stride + head * own_.value_head_stride +
                            begin * own_.value_token_stride);
    const int64_t first = (sequence * query_.queries + begin) * row + head * row / apart;
    return {.query = query,
            .own = own,
            .position = args_.past + begin,
            .sinks = sinks_ == nullptr ? nullptr : sinks_ + head * query.heads,
            .output = output_ + first * element,
            .output_stride = row};
  }

  Engine& engine_;
  const ExactArgs args_;
  QueryView query_;
  KeyValueView own_;
  std::byte* output_ = nullptr;  // [batch, tokens, heads, value_width()]
  int64_t output_bytes_ = 0;
  const float* sinks_ = nullptr;
  std::vector<float> sinks_copy_;
  std::vector<std::byte> query_copy_;
  std::vector<std::byte> keys_copy_;
  std::vector<std::byte> values_copy_;
  std::vector<std::byte> output_copy_;
};

class HostExactAttention final : public ExactAttention {
 public:
  Result<std::unique_ptr<ExactChunk>> begin(Engine& engine, const ExactArgs& args) const override {
    auto chunk = std::make_unique<HostChunk>(engine, args);
    KVSWAP_RETURN_IF_ERROR(chunk->fetch());
    return std::unique_ptr<ExactChunk>(std::move(chunk));
  }
};

}  // namespace

std::shared_ptr<ExactAttention> host_exact_attention() {
  return std::make_shared<HostExactAttention>();
}

}  // namespace kvswap
