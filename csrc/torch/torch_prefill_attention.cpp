#include "torch/torch_prefill_attention.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "torch/element_type.h"
#include "torch/expanded_attention.h"
#include "torch/partial_attention.h"
#include "torch/prefix_tensors.h"

namespace kvswap {
namespace {

/// [count] bool: which of the positions from `first` on count.
at::Tensor valid_positions(const PaddingMask& validity, int64_t first, int64_t count,
                           at::Device device) {
  at::Tensor valid = at::empty({count}, at::kBool);
  bool* data = valid.data_ptr<bool>();
  for (int64_t i = 0; i < count; ++i) data[i] = validity.is_valid(first + i);
  return valid.to(device);
}

/// What a part has attended so far.
class TorchPart final : public ExactPart {
 public:
  /// query, output: [heads, tokens, head_dim]; own: what the chunk saw of itself; sinks: [heads] or
  /// undefined; position: of the first token.
  TorchPart(const Engine& engine, int64_t part, at::Tensor query, PartialAttention own,
            const ScoreRule& rule, at::Tensor sinks, at::Tensor output, int64_t position)
      : engine_(engine),
        validity_(engine.sequences().validity(part)),
        query_(std::move(query)),
        partial_(std::move(own)),
        rule_(rule),
        sinks_(std::move(sinks)),
        output_(std::move(output)),
        position_(position) {}

  RetainedTokens::Window window(int64_t most) const override {
    const int64_t count = std::min(most, query_.size(1));
    const int64_t first = query_.size(1) - count;
    const at::Tensor queries = query_.narrow(1, first, count).cpu().contiguous();
    const at::Tensor sums = partial_.log_sum_exp.narrow(1, first, count).cpu().contiguous();
    const auto* bytes = static_cast<const std::byte*>(queries.data_ptr());
    return {.queries = {bytes, bytes + queries.nbytes()},
            .log_sum_exp = {sums.data_ptr<float>(), sums.data_ptr<float>() + sums.numel()},
            .count = count,
            .first_position = position_ + first,
            .scale = static_cast<float>(rule_.scale),
            .softcap = static_cast<float>(rule_.softcap)};
  }
  bool unpacks() const override { return true; }
  void add_sinks() override { kvswap::add_sinks(partial_, sinks_); }
  void write() override { output_.copy_(partial_.output); }

  Status visit_sealed(const PrefixStream::Block& block) override {
    const Plan& plan = engine_.context().plan;
    const auto [keys, values] = query_.is_cpu() ? unpack_here(plan, block, query_.options())
                                                : unpack_there(plan, block, query_.options());
    attend(keys, values, block.first_group * plan.options.group_tokens);
    return Status::ok();
  }

  Status visit_left(const SurvivingTokens& left) override {
    const EngineOptions& options = engine_.context().options;
    const int64_t group_tokens = options.group_tokens;
    const int64_t pages = (left.count + group_tokens - 1) / group_tokens;
    if (pages == 0) return Status::ok();
    const at::Tensor bytes = at::from_blob(const_cast<std::byte*>(left.pages.data()),
                                           {pages, engine_.context().plan.group_bytes}, at::kByte);
    const auto [keys, values] = split_pages(options, bytes.view(query_.scalar_type()));
    const at::Tensor left_keys = keys.narrow(1, 0, left.count);
    const at::Tensor left_values = values.narrow(1, 0, left.count);
    merge_part(partial_, attend_part(query_, left_keys, left_values, Causal::kNo, {}, rule_));
    return Status::ok();
  }

  Status visit_newest(int64_t begin, int64_t end, const std::byte* keys,
                      const std::byte* values) override {
    const EngineOptions& options = engine_.context().options;
    const auto there = [&](const std::byte* data, int64_t width) {
      return at::from_blob(const_cast<std::byte*>(data), {options.kv_heads, end - begin, width},
                           query_.options().device(at::kCPU))
          .to(query_.device());
    };
    attend(there(keys, options.head_dim), there(values, options.record_shape().value_width()),
           begin);
    return Status::ok();
  }

 private:
  /// Merges keys [kv_heads, count, head_dim], and values as many, that stand at positions
  /// `first`...
  void attend(const at::Tensor& keys, const at::Tensor& values, int64_t first) {
    std::optional<at::Tensor> allowed;
    if (first < validity_.all_valid_from()) {
      const at::Tensor valid = valid_positions(validity_, first, keys.size(1), at::kCPU);
      if (!valid.any().item<bool>()) return;
      allowed = valid.to(query_.device());
    }
    merge_part(partial_, attend_part(query_, keys, values, Causal::kNo, allowed, rule_));
  }

  const Engine& engine_;
  const PaddingMask& validity_;
  at::Tensor query_;
  PartialAttention partial_;
  ScoreRule rule_;
  at::Tensor sinks_;
  at::Tensor output_;
  int64_t position_;
};

/// A chunk's arrays as tensors, where they are.
class TorchChunk final : public ExactChunk {
 public:
  TorchChunk(Engine& engine, const ExactArgs& args, at::Device device)
      : engine_(engine), past_(args.past) {
    const EngineOptions& options = engine.options();
    const AttendArgs& attention = args.attention;
    const QueryView& query = attention.query;
    const KeyValueView& own = args.own;
    const int64_t batch = engine.batch();
    const int64_t dim = options.head_dim, value_width = options.record_shape().value_width();
    const auto there = at::TensorOptions(scalar_type(options.dtype)).device(device);
    const auto of_own = [&](const void* data, int64_t width, at::IntArrayRef strides) {
      const auto like = args.is_own_host ? there.device(at::kCPU) : there;
      return view_of(data, {batch, options.kv_heads, query.queries, width}, strides, like)
          .to(device);
    };
    query_ = view_of(query.data, {batch, query.heads, query.queries, dim},
                     {query.batch_stride, query.head_stride, query.query_stride, 1}, there);
    keys_ =
        of_own(own.keys, dim, {own.key_batch_stride, own.key_head_stride, own.key_token_stride, 1});
    values_ = of_own(own.values, value_width,
                     {own.value_batch_stride, own.value_head_stride, own.value_token_stride, 1});
    const int64_t row = query.heads * value_width;
    output_ = view_of(attention.output, {batch, query.heads, query.queries, value_width},
                      {query.queries * row, value_width, row, 1}, there);
    if (attention.sinks != nullptr) {
      sinks_ = view_of(attention.sinks, {query.heads}, {1}, there.dtype(at::kFloat));
    }
    rule_ = {.scale = attention.scale, .softcap = attention.softcap};
  }

  bool attend_alone() override {
    const at::Tensor values = as_wide_as(values_, keys_);
    const at::Tensor output =
        at::scaled_dot_product_attention(query_, keys_, values, {}, 0.0, true, rule_.scale, true);
    output_.copy_(output.narrow(-1, 0, values_.size(-1)));
    return true;
  }

  void clear() override { output_.zero_(); }

  std::unique_ptr<ExactPart> part(int64_t part, int64_t begin) override {
    const int64_t apart = engine_.context().options.heads_apart;
    const int64_t tokens = query_.size(2) - begin;
    const auto slice = [&](const at::Tensor& tensor) {
      const int64_t heads = tensor.size(1) / apart;
      return tensor[part / apart].narrow(0, part % apart * heads, heads).narrow(1, begin, tokens);
    };
    const int64_t position = past_ + begin;
    const at::Tensor query = slice(query_);
    const at::Tensor keys = slice(keys_);
    const at::Tensor values = slice(values_);
    const PaddingMask& validity = engine_.sequences().validity(part);
    PartialAttention own;
    if (validity.all_valid_from() <= position) {
      own = attend_part(query, keys, values, Causal::kYes, std::nullopt, rule_);
    } else {
      const at::Tensor valid = valid_positions(validity, position, tokens, query.device());
      own = attend_own_masked(query, keys, values, valid, rule_);
    }
    const int64_t heads = query.size(0);
    at::Tensor sinks;
    if (sinks_.defined()) sinks = sinks_.narrow(0, part % apart * heads, heads);
    return std::make_unique<TorchPart>(engine_, part, query, std::move(own), rule_, sinks,
                                       slice(output_), position);
  }

 private:
  static at::Tensor view_of(const void* data, at::IntArrayRef sizes, at::IntArrayRef strides,
                            const at::TensorOptions& options) {
    return at::for_blob(const_cast<void*>(data), sizes)
        .strides(strides)
        .options(options)
        .target_device(options.device())
        .make_tensor();
  }

  Engine& engine_;
  int64_t past_;
  at::Tensor query_;   // [batch, heads, tokens, head_dim], as all but sinks
  at::Tensor keys_;    // of the chunk itself
  at::Tensor values_;  // likewise, and perhaps narrower, as output_
  at::Tensor output_;
  at::Tensor sinks_;  // [heads] fp32, or undefined
  ScoreRule rule_;
};

class TorchExactAttention final : public ExactAttention {
 public:
  explicit TorchExactAttention(at::Device device) : device_(device) {}

  Result<std::unique_ptr<ExactChunk>> begin(Engine& engine, const ExactArgs& args) const override {
    const EngineOptions& options = engine.options();
    if (const ExpandedScope* expanded = ExpandedScope::current()) {
      return expanded->begin(engine, args);
    }
    if (!options.device && is_chunk_attention_fast(options.dtype)) {
      return host_->begin(engine, args);
    }
    return std::unique_ptr<ExactChunk>(std::make_unique<TorchChunk>(engine, args, device_));
  }

 private:
  at::Device device_;
  std::shared_ptr<ExactAttention> host_ = host_exact_attention();
};

}  // namespace

std::shared_ptr<ExactAttention> torch_exact_attention(at::Device device) {
  return std::make_shared<TorchExactAttention>(device);
}

}  // namespace kvswap
