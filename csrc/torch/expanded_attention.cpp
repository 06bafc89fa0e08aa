#include "torch/expanded_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/chunk_attention.h"
#include "torch/element_type.h"
#include "torch/op_checks.h"
#include "torch/partial_attention.h"
#include "torch/prefix_tensors.h"

namespace kvswap {
namespace {

constexpr int64_t kExpandedBytes = int64_t{32} << 20;  // of keys and values that are there at once
constexpr int64_t kExpandedTokensMin = 64;

thread_local const ExpandedScope* scope_of_thread = nullptr;

/// Zeros behind the last dimension, up to `width`.
at::Tensor widened(const at::Tensor& tensor, int64_t width) {
  const int64_t missing = width - tensor.size(-1);
  return missing == 0 ? tensor : at::constant_pad_nd(tensor, {0, missing});
}

/// One sequence: what its queries have attended so far.
class ExpandedPart final : public ExactPart {
 public:
  /// query: [heads, tokens, unrotated + rotary]; sinks: [heads] or undefined; output: [tokens,
  /// heads, value]; position: of the first query.
  ExpandedPart(const Engine& engine, int64_t part, const ExpandedQueries& queries,
               const at::Tensor& query, const AttendArgs& args, at::Tensor sinks, at::Tensor output,
               int64_t position)
      : engine_(engine),
        options_(engine.context().plan.options),
        validity_(engine.sequences().validity(part)),
        queries_(queries),
        width_(std::max(query.size(2), queries.value_dim())),
        plain_(query),
        query_(widened(query, width_)),
        args_(args),
        sinks_(std::move(sinks)),
        written_(std::move(output)),
        position_(position) {
    const auto numbers = query.options().dtype(at::kFloat);
    output_ = at::zeros({query.size(1), query.size(0), width_}, numbers);
    log_sum_exp_ =
        at::full({query.size(1), query.size(0)}, -std::numeric_limits<float>::infinity(), numbers);
  }

  bool unpacks() const override { return true; }
  Status visit_sealed(const PrefixStream::Block& block) override {
    const Plan& plan = engine_.context().plan;
    attend(unpack_here(plan, block, query_.options()).first[0],
           block.first_group * options_.group_tokens);
    return Status::ok();
  }
  Status visit_left(const SurvivingTokens& left) override {
    const int64_t pages = (left.count + options_.group_tokens - 1) / options_.group_tokens;
    if (pages == 0) return Status::ok();
    const at::Tensor bytes = at::from_blob(const_cast<std::byte*>(left.pages.data()),
                                           {pages, engine_.context().plan.group_bytes}, at::kByte);
    const at::Tensor keys = split_pages(options_, bytes.view(query_.scalar_type())).first[0];
    // They all count, and are before every query of the chunk, wherever they stood.
    attend_blocks(keys.narrow(0, 0, left.count), position_ - left.count, {});
    return Status::ok();
  }
  Status visit_newest(int64_t begin, int64_t end, const std::byte* keys,
                      const std::byte* values) override {
    (void)values;  // of one side: they are the keys
    attend(at::from_blob(const_cast<std::byte*>(keys), {end - begin, options_.head_dim},
                         query_.options()),
           begin);
    return Status::ok();
  }

  /// Latents with their rotated keys, [tokens, rank + rotary], at positions `first`...
  void attend(const at::Tensor& records, int64_t first) {
    std::vector<uint8_t> valid;
    if (first < validity_.all_valid_from()) {
      valid.resize(records.size(0));
      for (int64_t t = 0; t < records.size(0); ++t) valid[t] = validity_.is_valid(first + t);
      if (std::ranges::count(valid, 0) == records.size(0)) return;
    }
    attend_blocks(records, first, valid);
  }

  void add_sinks() override {
    const at::Tensor share = at::sigmoid(log_sum_exp_ - sinks_);
    output_.mul_(share.unsqueeze(-1));
    log_sum_exp_.sub_(share.log());
  }

  RetainedTokens::Window window(int64_t most) const override {
    const int64_t count = std::min(most, plain_.size(1));
    const int64_t first = plain_.size(1) - count;
    ExpandedQueries newest = queries_;
    newest.query = plain_.narrow(1, first, count).unsqueeze(0);
    const at::Tensor queries = newest.absorbed().contiguous();
    const at::Tensor sums = log_sum_exp_.narrow(0, first, count).t().contiguous();
    const auto* bytes = static_cast<const std::byte*>(queries.data_ptr());
    return {.queries = {bytes, bytes + queries.nbytes()},
            .log_sum_exp = {sums.data_ptr<float>(), sums.data_ptr<float>() + sums.numel()},
            .count = count,
            .first_position = position_ + first,
            .scale = args_.scale,
            .softcap = args_.softcap};
  }

  void write() override { written_.copy_(output_.narrow(2, 0, queries_.value_dim())); }

 private:
  struct Expanded {
    at::Tensor keys;    // [heads, tokens, width]
    at::Tensor values;  // likewise
  };

  Expanded expand(const at::Tensor& records) const {
    const int64_t tokens = records.size(0);
    const int64_t rank = queries_.rank();
    const at::Tensor made =
        at::matmul(records.narrow(1, 0, rank), queries_.weight.view({-1, rank}).t())
            .view({tokens, queries_.heads(), -1})
            .transpose(0, 1);
    const at::Tensor rotated = records.narrow(1, rank, queries_.rotary())
                                   .unsqueeze(0)
                                   .expand({queries_.heads(), tokens, queries_.rotary()});
    const at::Tensor keys = at::cat({made.narrow(2, 0, queries_.unrotated), rotated}, 2);
    return {widened(keys, width_),
            widened(made.narrow(2, queries_.unrotated, queries_.value_dim()), width_)};
  }

  /// Tokens that are expanded at once.
  int64_t tokens_at_once() const {
    const int64_t each = queries_.heads() * (queries_.weight.size(1) + 2 * width_) *
                         static_cast<int64_t>(query_.element_size());
    return std::max(kExpandedTokensMin, kExpandedBytes / each);
  }

  /// valid: [tokens], or empty: all count.
  void attend_blocks(const at::Tensor& records, int64_t first, const std::vector<uint8_t>& valid) {
    const int64_t at_once = tokens_at_once();
    for (int64_t begin = 0; begin < records.size(0); begin += at_once) {
      const int64_t count = std::min(at_once, records.size(0) - begin);
      const Expanded made = expand(records.narrow(0, begin, count));
      const uint8_t* counts = valid.empty() ? nullptr : valid.data() + begin;
      if (queries_.by_torch.value_or(!is_chunk_attention_fast(options_.dtype))) {
        attend_by_torch(made, first + begin, counts);
      } else {
        attend_here(made, first + begin, counts);
      }
    }
  }

  void attend_here(const Expanded& made, int64_t first, const uint8_t* valid) {
    chunk_attention({.query = query_.data_ptr(),
                     .query_head_stride = query_.stride(0),
                     .query_token_stride = query_.stride(1),
                     .output = output_.data_ptr<float>(),
                     .log_sum_exp = log_sum_exp_.data_ptr<float>(),
                     .view = {.keys = made.keys.data_ptr(),
                              .values = made.values.data_ptr(),
                              .key_head_stride = made.keys.stride(0),
                              .key_token_stride = made.keys.stride(1),
                              .value_head_stride = made.values.stride(0),
                              .value_token_stride = made.values.stride(1)},
                     .valid = valid,
                     .tokens = made.keys.size(1),
                     .position = first,
                     .query_position = position_,
                     .heads = query_.size(0),
                     .queries = query_.size(1),
                     .scale = args_.scale,
                     .softcap = args_.softcap,
                     .shape = {.kv_heads = query_.size(0),
                               .group_tokens = 1,
                               .head_dim = width_,
                               .element_bytes = dtype_bytes(options_.dtype)},
                     .dtype = options_.dtype},
                    torch_execution());
  }

  /// By torch's flash attention: queries at the block's own positions, then all later ones.
  void attend_by_torch(const Expanded& made, int64_t first, const uint8_t* valid) {
    const int64_t tokens = made.keys.size(1);
    const int64_t own = std::clamp<int64_t>(first - position_, 0, query_.size(1));
    const int64_t later = std::clamp<int64_t>(first + tokens - position_, 0, query_.size(1));
    std::optional<at::Tensor> counts;
    if (valid != nullptr) {
      counts = at::from_blob(const_cast<uint8_t*>(valid), {tokens}, at::kByte).to(at::kBool);
    }
    if (later > own) {
      const at::Tensor query = query_.narrow(1, own, later - own);
      merge(own, counts ? attend_own_masked(query, made.keys, made.values, *counts, rule())
                        : attend_part(query, made.keys, made.values, Causal::kYes, {}, rule()));
    }
    if (later == query_.size(1) || (counts && !counts->any().item<bool>())) return;
    const at::Tensor query = query_.narrow(1, later, query_.size(1) - later);
    merge(later, attend_part(query, made.keys, made.values, Causal::kNo, counts, rule()));
  }

  /// What queries from `row` on have attended beside the rest.
  void merge(int64_t row, const PartialAttention& part) {
    const int64_t rows = part.output.size(1);
    const at::Tensor output = output_.narrow(0, row, rows);
    const at::Tensor sums = log_sum_exp_.narrow(0, row, rows);
    PartialAttention into = {output.transpose(0, 1), sums.t()};
    merge_part(into, part);
    output.copy_(into.output.transpose(0, 1));
    sums.copy_(into.log_sum_exp.t());
  }

  ScoreRule rule() const { return {.scale = args_.scale, .softcap = args_.softcap}; }

  const Engine& engine_;
  const EngineOptions& options_;
  const PaddingMask& validity_;
  const ExpandedQueries queries_;
  const int64_t width_;  // of keys and values alike, as kernels want them
  const at::Tensor plain_;
  const at::Tensor query_;  // [heads, tokens, width]
  const AttendArgs args_;
  const at::Tensor sinks_;
  const at::Tensor written_;
  const int64_t position_;
  at::Tensor output_;       // [tokens, heads, width] fp32
  at::Tensor log_sum_exp_;  // [tokens, heads] fp32
};

class ExpandedChunk final : public ExactChunk {
 public:
  ExpandedChunk(Engine& engine, const ExactArgs& args, const ExpandedQueries& queries,
                at::Tensor output)
      : engine_(engine), args_(args), queries_(queries), output_(std::move(output)) {
    const EngineOptions& options = engine.options();
    const KeyValueView& own = args.own;
    own_ = at::for_blob(const_cast<void*>(own.keys),
                        {engine.batch(), queries_.query.size(2), options.head_dim})
               .strides({own.key_batch_stride, own.key_token_stride, 1})
               .options(queries_.query.options())
               .make_tensor();
    if (args.attention.sinks != nullptr) {
      sinks_ = at::from_blob(const_cast<float*>(args.attention.sinks), {queries_.heads()},
                             queries_.query.options().dtype(at::kFloat));
    }
  }

  bool attend_alone() override { return false; }
  void clear() override { output_.zero_(); }

  std::unique_ptr<ExactPart> part(int64_t part, int64_t begin) override {
    const int64_t tokens = queries_.query.size(2) - begin;
    auto attending = std::make_unique<ExpandedPart>(
        engine_, part, queries_, queries_.query[part].narrow(1, begin, tokens), args_.attention,
        sinks_, output_[part].narrow(0, begin, tokens), args_.past + begin);
    attending->attend(own_[part].narrow(0, begin, tokens), args_.past + begin);
    return attending;
  }

 private:
  Engine& engine_;
  const ExactArgs args_;
  const ExpandedQueries queries_;
  const at::Tensor output_;
  at::Tensor own_;    // [batch, tokens, rank + rotary] of the chunk itself
  at::Tensor sinks_;  // [heads] fp32, or undefined
};

}  // namespace

std::unique_ptr<ExactChunk> expanded_chunk(Engine& engine, const ExactArgs& args,
                                           const ExpandedQueries& queries, at::Tensor output) {
  return std::make_unique<ExpandedChunk>(engine, args, queries, std::move(output));
}

ExpandedScope::ExpandedScope(ExpandedQueries queries, at::Tensor output)
    : queries_(std::move(queries)), output_(std::move(output)) {
  KVSWAP_ASSERT(scope_of_thread == nullptr);
  scope_of_thread = this;
}
ExpandedScope::~ExpandedScope() { scope_of_thread = nullptr; }
const ExpandedScope* ExpandedScope::current() { return scope_of_thread; }

}  // namespace kvswap
