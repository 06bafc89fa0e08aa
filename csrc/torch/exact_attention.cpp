#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/merge_attention.h"
#include "kernels/records.h"
#include "runtime/past_stream.h"
#include "torch/engine_calls.h"
#include "torch/parallel.h"

namespace kvswap {

namespace {

/// Query rows that a mask is built for at once, so that it never grows with the square.
constexpr int64_t kMaskedRows = 512;

struct Partial {
  at::Tensor output;       // [heads, rows, head_dim] fp32 once merged
  at::Tensor log_sum_exp;  // [heads, rows] fp32
};

Partial flash(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
              bool is_causal, const std::optional<at::Tensor>& mask, double scale) {
  auto [output, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(
      query.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), 0.0, is_causal, mask, scale);
  return {output.squeeze(0).to(at::kFloat).contiguous(),
          log_sum_exp.squeeze(0).to(at::kFloat).contiguous()};
}

void merge(Partial& into, const Partial& other) {
  MergeAttentionArgs args;
  args.output = into.output.data_ptr();
  args.log_sum_exp = into.log_sum_exp.data_ptr<float>();
  args.other_output = other.output.data_ptr();
  args.other_log_sum_exp = other.log_sum_exp.data_ptr<float>();
  args.rows = into.log_sum_exp.numel();
  args.head_dim = into.output.size(-1);
  args.dtype = DType::kFloat32;
  merge_attention(args, {});
}

/// [count] bool: which of the columns from `first` on count.
at::Tensor valid_columns(const TokenValidity& validity, int64_t first, int64_t count) {
  at::Tensor valid = at::empty({count}, at::kBool);
  bool* data = valid.data_ptr<bool>();
  for (int64_t i = 0; i < count; ++i) data[i] = validity.is_valid(first + i);
  return valid;
}

at::Tensor additive(const at::Tensor& allowed, at::ScalarType dtype) {
  return at::zeros(allowed.sizes(), dtype)
      .masked_fill_(allowed.logical_not(), -std::numeric_limits<float>::infinity());
}

/// A chunk with padding in its middle: causal, valid keys only; each row sees at least itself.
Partial attend_masked(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                      const at::Tensor& valid, double scale) {
  const int64_t tokens = query.size(1);
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> log_sum_exps;
  const at::Tensor columns = at::arange(tokens);
  for (int64_t row = 0; row < tokens; row += kMaskedRows) {
    const int64_t end = std::min(tokens, row + kMaskedRows);
    const at::Tensor rows = at::arange(row, end).unsqueeze(1);
    const at::Tensor allowed =
        columns.le(rows).logical_and(valid).logical_or(columns.eq(rows)).narrow(1, 0, end);
    const at::Tensor mask = additive(allowed, query.scalar_type()).unsqueeze(0).unsqueeze(0);
    Partial part = flash(query.narrow(1, row, end - row), keys.narrow(1, 0, end),
                         values.narrow(1, 0, end), false, mask, scale);
    outputs.push_back(part.output);
    log_sum_exps.push_back(part.log_sum_exp);
  }
  return {at::cat(outputs, 1).contiguous(), at::cat(log_sum_exps, 1).contiguous()};
}

/// One sequence's chunk and what it has attended so far.
struct Chunk {
  Engine& engine;
  int64_t layer;
  int64_t sequence;
  at::Tensor query;  // [heads, tokens, head_dim]
  Partial partial;
  double scale;

  /// Merges keys and values [kv_heads, count, head_dim] that stand at columns `first`...
  void attend(const at::Tensor& keys, const at::Tensor& values, int64_t first) {
    const TokenValidity& validity = engine.validity(sequence);
    const int64_t count = keys.size(1);
    std::optional<at::Tensor> mask;
    if (first < validity.all_valid_from()) {
      const at::Tensor valid = valid_columns(validity, first, count);
      if (!valid.any().item<bool>()) return;
      mask = additive(valid, query.scalar_type()).expand({1, 1, query.size(1), count}).contiguous();
    }
    merge(partial, flash(query, keys, values, false, mask, scale));
  }
};

/// [kv_heads, groups * group_tokens, head_dim] twice, from records.
std::pair<at::Tensor, at::Tensor> unpack(const EngineOptions& options,
                                         const PastStream::Block& block, int64_t record_bytes,
                                         const at::TensorOptions& like) {
  const int64_t tokens = block.groups * options.group_tokens;
  at::Tensor keys = at::empty({options.kv_heads, tokens, options.head_dim}, like);
  at::Tensor values = at::empty_like(keys);
  std::vector<void*> records(block.groups);
  std::vector<int64_t> first_tokens(block.groups);
  for (int64_t i = 0; i < block.groups; ++i) {
    records[i] = const_cast<std::byte*>(block.records + i * record_bytes);
    first_tokens[i] = i * options.group_tokens;
  }
  const int64_t head_stride = tokens * options.head_dim;
  at_parallel_for()(block.groups, 16, [&](int64_t begin, int64_t end) {
    unpack_records({.shape = {options.kv_heads, options.group_tokens, options.head_dim,
                              dtype_bytes(options.dtype)},
                    .tokens = {.keys = keys.data_ptr(),
                               .values = values.data_ptr(),
                               .key_head_stride = head_stride,
                               .key_token_stride = options.head_dim,
                               .value_head_stride = head_stride,
                               .value_token_stride = options.head_dim},
                    .records = records.data() + begin,
                    .first_tokens = first_tokens.data() + begin,
                    .slots = nullptr,
                    .lengths = nullptr,
                    .count = end - begin});
  });
  return {keys, values};
}

/// Merges columns [0, past) of one sequence into what the chunk saw of itself: sealed groups from
/// disk, block by block, and the rest from the tail.
void attend_past(Chunk& chunk, int64_t past) {
  Engine& engine = chunk.engine;
  const EngineOptions& options = engine.options();
  const int64_t group_tokens = options.group_tokens;
  const int64_t first_group =
      std::min(past, engine.validity(chunk.sequence).first_valid()) / group_tokens;
  // append() may have sealed a group that the chunk's own first tokens fill up.
  const int64_t end_group =
      std::max(first_group, std::min(past / group_tokens, engine.sealed_groups(chunk.layer)));
  auto stream = PastStream::open(engine, chunk.layer, chunk.sequence, first_group, end_group);
  throw_if_error(stream.status());
  while (true) {
    auto block = stream.value()->next();
    throw_if_error(block.status());
    if (block.value().groups == 0) break;
    const auto [keys, values] =
        unpack(options, block.value(), engine.record_bytes(), chunk.query.options());
    chunk.attend(keys, values, block.value().first_group * group_tokens);
  }
  const int64_t rest = end_group * group_tokens;
  if (rest == past) return;
  at::Tensor keys =
      at::empty({options.kv_heads, past - rest, options.head_dim}, chunk.query.options());
  at::Tensor values = at::empty_like(keys);
  throw_if_error(engine.read_back(chunk.layer, chunk.sequence, rest, past, keys.data_ptr(),
                                  values.data_ptr()));
  chunk.attend(keys, values, rest);
}

}  // namespace

at::Tensor attend_exactly(Engine& engine, int64_t layer, const at::Tensor& query,
                          const at::Tensor& keys, const at::Tensor& values, double scale) {
  const int64_t tokens = query.size(2);
  const int64_t past = engine.columns(layer) - tokens;
  bool is_plain = past == 0;
  for (int64_t sequence = 0; sequence < engine.batch(); ++sequence) {
    is_plain = is_plain && engine.validity(sequence).all_valid_from() == 0;
  }
  if (is_plain) {
    return at::scaled_dot_product_attention(query, keys, values, {}, 0.0, true, scale, true)
        .transpose(1, 2)
        .contiguous();
  }
  at::Tensor output =
      at::zeros({query.size(0), tokens, query.size(1), query.size(3)}, query.options());
  for (int64_t sequence = 0; sequence < engine.batch(); ++sequence) {
    const TokenValidity& validity = engine.validity(sequence);
    const int64_t begin = std::clamp<int64_t>(validity.first_valid() - past, 0, tokens);
    if (begin == tokens) continue;
    const auto slice = [&](const at::Tensor& tensor) {
      return tensor[sequence].narrow(1, begin, tokens - begin);
    };
    const at::Tensor own_query = slice(query);
    Partial own = validity.all_valid_from() <= past + begin
                      ? flash(own_query, slice(keys), slice(values), true, std::nullopt, scale)
                      : attend_masked(own_query, slice(keys), slice(values),
                                      valid_columns(validity, past + begin, tokens - begin), scale);
    Chunk chunk = {engine, layer, sequence, own_query, std::move(own), scale};
    attend_past(chunk, past);
    output[sequence].narrow(0, begin, tokens - begin).copy_(chunk.partial.output.transpose(0, 1));
  }
  return output;
}

}  // namespace kvswap
