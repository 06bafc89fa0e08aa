#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/merge_attention.h"
#include "runtime/engine.h"
#include "torch/engine_calls.h"

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

/// Merges columns [0, past) of one sequence, block by block, into what the chunk saw of itself.
void attend_past(Engine& engine, int64_t layer, int64_t sequence, int64_t past,
                 const at::Tensor& query, Partial& partial, double scale) {
  const EngineOptions& options = engine.options();
  const TokenValidity& validity = engine.validity(sequence);
  const int64_t block_tokens =
      options.past_block_groups(engine.record_bytes()) * options.group_tokens;
  const int64_t first = validity.first_valid() / options.group_tokens * options.group_tokens;
  for (int64_t begin = first; begin < past; begin += block_tokens) {
    const int64_t end = std::min(past, begin + block_tokens);
    at::Tensor keys =
        at::empty({options.kv_heads, end - begin, options.head_dim}, query.options());
    at::Tensor values = at::empty_like(keys);
    throw_if_error(engine.read_back(layer, sequence, begin, end, keys.data_ptr(),
                                    values.data_ptr()));
    std::optional<at::Tensor> mask;
    if (begin < validity.all_valid_from()) {
      const at::Tensor valid = valid_columns(validity, begin, end - begin);
      if (!valid.any().item<bool>()) continue;
      mask = additive(valid, query.scalar_type())
                 .expand({1, 1, query.size(1), end - begin})
                 .contiguous();
    }
    merge(partial, flash(query, keys, values, false, mask, scale));
  }
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
    Partial partial =
        validity.all_valid_from() <= past + begin
            ? flash(own_query, slice(keys), slice(values), true, std::nullopt, scale)
            : attend_masked(own_query, slice(keys), slice(values),
                            valid_columns(validity, past + begin, tokens - begin), scale);
    attend_past(engine, layer, sequence, past, own_query, partial, scale);
    output[sequence].narrow(0, begin, tokens - begin).copy_(partial.output.transpose(0, 1));
  }
  return output;
}

}  // namespace kvswap
