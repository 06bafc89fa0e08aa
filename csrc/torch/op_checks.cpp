#include "torch/op_checks.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

#include "kernels/low_rank_score.h"
#include "kernels/paged_attention.h"

namespace kvswap {

RecordShape check_pages(const char* where, const at::Tensor& pages, const at::Tensor& table) {
  check_shape(where, "pages", pages, "[slots, kv_heads, 2, group_tokens, head_dim]",
              {-1, -1, 2, -1, -1});
  check_floating(where, "pages", pages.scalar_type());
  check_shape(where, "table", table, "[batch, 1 or kv_heads, pages]", {-1, -1, -1});
  check_dtype(where, "table", table, at::kInt);
  check_range(where, "kv_heads", pages.size(1), 1, kIndexMax);
  check_range(where, "group_tokens", pages.size(3), 1, kGroupTokensMax);
  check_range(where, "rows of table", table.size(1), 1, kIndexMax);
  const RecordShape shape{pages.size(1), pages.size(3), pages.size(4), pages.element_size()};
  TORCH_CHECK_VALUE(table.size(1) == 1 || shape.kv_heads == 1 || table.size(1) == shape.kv_heads,
                    where, ": table must have one row for all KV heads or one for each of ",
                    shape.kv_heads, ", got ", table.size(1));
  return shape;
}

void check_attention(const char* where, const AttentionInputs& inputs, const RecordShape& shape) {
  const auto& [query, pages, table, masks, positions, query_positions] = inputs;
  check_shape(where, "query", query, "[batch, heads, queries, head_dim]",
              {table.size(0), -1, -1, shape.head_dim});
  check_dtype(where, "query", query, pages.scalar_type());
  check_range(where, "queries", query.size(2), 1, kChunkQueriesMax);
  const int64_t kv_heads = std::max(shape.kv_heads, table.size(1));
  TORCH_CHECK_VALUE(query.size(1) % kv_heads == 0, where, ": heads must be a multiple of ",
                    kv_heads, " KV heads, got ", query.size(1));
  check_shape(where, "masks", masks, "the shape of table", table.sizes());
  check_dtype(where, "masks", masks, at::kLong);
  check_shape(where, "positions", positions, "the shape of table", table.sizes());
  check_dtype(where, "positions", positions, at::kInt);
  check_shape(where, "query_positions", query_positions, "[batch]", {table.size(0)});
  check_dtype(where, "query_positions", query_positions, at::kInt);
}

void check_terms(const char* where, double scale, double softcap) {
  TORCH_CHECK_VALUE(scale > 0 && std::isfinite(scale), where,
                    ": scale must be finite and above 0, got ", scale);
  TORCH_CHECK_VALUE(softcap >= 0 && std::isfinite(softcap), where,
                    ": softcap must be finite and at least 0, got ", softcap);
}

void check_log_sum_exp(const char* where, const at::Tensor& log_sum_exp, const at::Tensor& query) {
  check_shape(where, "log_sum_exp", log_sum_exp, "[batch, heads, queries]",
              {query.size(0), query.size(1), query.size(2)});
  check_dtype(where, "log_sum_exp", log_sum_exp, at::kFloat);
}

void check_observed(const ObservedInputs& inputs) {
  constexpr const char* kWhere = "observe_keys";
  const auto& [query, keys, valid, log_sum_exp] = inputs;
  check_shape(kWhere, "keys", keys, "[batch, kv_heads, tokens, head_dim]", {-1, -1, -1, -1});
  check_floating(kWhere, "keys", keys.scalar_type());
  check_shape(kWhere, "query", query, "[batch, heads, queries, head_dim]",
              {keys.size(0), -1, -1, keys.size(3)});
  TORCH_CHECK_VALUE(keys.scalar_type() == query.scalar_type(), kWhere, ": keys must be ",
                    query.scalar_type(), " as query, got ", keys.scalar_type());
  check_range(kWhere, "queries", query.size(2), 1, keys.size(2));
  check_range(kWhere, "tokens", keys.size(2), 1, kIndexMax);
  TORCH_CHECK_VALUE(keys.size(1) > 0 && query.size(1) % keys.size(1) == 0, kWhere,
                    ": heads must be a multiple of ", keys.size(1), " KV heads, got ",
                    query.size(1));
  if (valid) {
    check_shape(kWhere, "valid", *valid, "[batch, tokens]", {keys.size(0), keys.size(2)});
    check_dtype(kWhere, "valid", *valid, at::kBool);
  }
  if (log_sum_exp) check_log_sum_exp(kWhere, *log_sum_exp, query);
}

ObserveKeysArgs observe_args(const at::Tensor& query, const at::Tensor& keys, double scale) {
  return {.query = query.const_data_ptr(),
          .query_batch_stride = query.stride(0),
          .query_head_stride = query.stride(1),
          .query_token_stride = query.stride(2),
          .keys = keys.const_data_ptr(),
          .key_batch_stride = keys.stride(0),
          .key_head_stride = keys.stride(1),
          .key_token_stride = keys.stride(2),
          .batch = keys.size(0),
          .heads = query.size(1),
          .kv_heads = keys.size(1),
          .queries = query.size(2),
          .tokens = keys.size(2),
          .head_dim = keys.size(3),
          .scale = static_cast<float>(scale),
          .dtype = to_dtype(keys.scalar_type())};
}

at::Tensor packed_bits(const at::Tensor& valid) {
  const int64_t words = (valid.size(1) + 63) / 64;
  const at::Tensor bits = at::constant_pad_nd(valid.to(at::kLong), {0, words * 64 - valid.size(1)})
                              .view({valid.size(0), words, 64});
  return bits.bitwise_left_shift(at::arange(64, bits.options())).sum(-1).contiguous();
}

at::Tensor contiguous_sinks(const char* where, const std::optional<at::Tensor>& sinks,
                            const at::Tensor& query) {
  if (!sinks) return {};
  check_shape(where, "sinks", *sinks, "[heads]", {query.size(1)});
  check_dtype(where, "sinks", *sinks, at::kFloat);
  TORCH_CHECK_VALUE(sinks->device() == query.device(), where, ": sinks must be on ", query.device(),
                    ", got ", sinks->device());
  return sinks->contiguous();
}

void check_merge(const at::Tensor& output, const at::Tensor& log_sum_exp,
                 const at::Tensor& other_output, const at::Tensor& other_log_sum_exp) {
  constexpr const char* kWhere = "merge_attention";
  check_floating(kWhere, "output", output.scalar_type());
  TORCH_CHECK_VALUE(output.dim() >= 1, kWhere, ": output must be [..., head_dim], got a scalar");
  check_shape(kWhere, "other_output", other_output, "the shape of output", output.sizes());
  check_dtype(kWhere, "other_output", other_output, output.scalar_type());
  const auto rows = output.sizes().slice(0, output.dim() - 1);
  for (const auto& [name, tensor] : {std::pair{"log_sum_exp", &log_sum_exp},
                                     std::pair{"other_log_sum_exp", &other_log_sum_exp}}) {
    check_shape(kWhere, name, *tensor, "the shape of output without head_dim", rows);
    check_dtype(kWhere, name, *tensor, at::kFloat);
  }
}

void check_pack(const at::Tensor& keys, const at::Tensor& values, int64_t group_tokens) {
  check_shape("pack_records", "keys", keys, "[batch, kv_heads, tokens, head_dim]",
              {-1, -1, -1, -1});
  check_shape("pack_records", "values", values, "the shape of keys", keys.sizes());
  check_floating("pack_records", "keys", keys.scalar_type());
  check_dtype("pack_records", "values", values, keys.scalar_type());
  check_range("pack_records", "group_tokens", group_tokens, 1, kGroupTokensMax);
}

std::pair<at::Tensor, at::Tensor> check_unpack(const at::Tensor& records, int64_t tokens,
                                               c10::string_view layout) {
  check_shape("unpack_records", "records", records,
              "[batch, groups, kv_heads, 2, group_tokens, head_dim]", {-1, -1, -1, 2, -1, -1});
  check_floating("unpack_records", "records", records.scalar_type());
  check_range("unpack_records", "group_tokens", records.size(4), 1, kGroupTokensMax);
  check_range("unpack_records", "tokens", tokens, 0, records.size(1) * records.size(4));
  TORCH_CHECK_VALUE(layout == "hnd" || layout == "nhd",
                    "unpack_records: layout must be \"hnd\" or \"nhd\", got \"", layout, "\"");
  const auto make = [&]() {
    const int64_t batch = records.size(0), kv_heads = records.size(2), head_dim = records.size(5);
    if (layout == "hnd") return at::empty({batch, kv_heads, tokens, head_dim}, records.options());
    return at::empty({batch, tokens, kv_heads, head_dim}, records.options()).transpose(1, 2);
  };
  return {make(), make()};
}

void check_fp8_quantize(const at::Tensor& source) {
  check_floating("fp8_quantize", "source", source.scalar_type());
  TORCH_CHECK_VALUE(source.dim() >= 1,
                    "fp8_quantize: source must be [..., head_dim], got a scalar");
}

void check_fp8_dequantize(const at::Tensor& quantized, const at::Tensor& scales,
                          at::ScalarType dtype) {
  check_dtype("fp8_dequantize", "quantized", quantized, at::kFloat8_e4m3fn);
  check_dtype("fp8_dequantize", "scales", scales, at::kFloat);
  TORCH_CHECK_VALUE(quantized.dim() >= 1,
                    "fp8_dequantize: quantized must be [..., head_dim], got a scalar");
  check_shape("fp8_dequantize", "scales", scales, "the shape of quantized without head_dim",
              quantized.sizes().slice(0, quantized.dim() - 1));
  check_floating("fp8_dequantize", "dtype", dtype);
}

void check_summary(const char* where, const at::Tensor& summary,
                   const OptionalTensor& token_scale) {
  check_shape(where, "summary", summary, "[batch, blocks, rank, 16]", {-1, -1, -1, kSummaryBlock});
  check_range(where, "rank", summary.size(2), 1, kIndexMax);
  const bool is_int8 = summary.scalar_type() == at::kChar;
  if (!is_int8) check_floating(where, "summary (unless int8)", summary.scalar_type());
  TORCH_CHECK_VALUE(is_int8 == token_scale.has_value(), where,
                    ": token_scale must be given with an int8 summary and only then, got ",
                    token_scale ? "one" : "none", " for ", summary.scalar_type());
  if (!is_int8) return;
  check_shape(where, "token_scale", *token_scale, "[batch, blocks, 16]",
              {summary.size(0), summary.size(1), kSummaryBlock});
  check_dtype(where, "token_scale", *token_scale, at::kFloat);
}

void check_score(const at::Tensor& summary, const at::Tensor& query) {
  check_shape("low_rank_score", "query", query, "[batch, queries, rank]",
              {summary.size(0), -1, summary.size(2)});
  check_dtype("low_rank_score", "query", query, at::kFloat);
}

void check_group_max(const at::Tensor& scores, int64_t group_tokens) {
  check_shape("group_max", "scores", scores, "[batch, tokens]", {-1, -1});
  check_dtype("group_max", "scores", scores, at::kFloat);
  check_range("group_max", "group_tokens", group_tokens, 1, kGroupTokensMax);
}

HeadJoin check_mass(const at::Tensor& summary, const at::Tensor& query, int64_t group_tokens,
                    c10::string_view join) {
  check_shape("group_mass", "query", query, "[batch, heads, rank]",
              {summary.size(0), -1, summary.size(2)});
  check_dtype("group_mass", "query", query, at::kFloat);
  check_range("group_mass", "group_tokens", group_tokens, 1, kGroupTokensMax);
  TORCH_CHECK_VALUE(join == "sum" || join == "max", "group_mass: join must be sum or max, got ",
                    join);
  return join == "sum" ? HeadJoin::kSum : HeadJoin::kMax;
}

void check_top_k(const at::Tensor& scores, int64_t k) {
  check_shape("top_k_groups", "scores", scores, "[batch, groups]", {-1, -1});
  check_dtype("top_k_groups", "scores", scores, at::kFloat);
  check_range("top_k_groups", "k", k, 0, kIndexMax);
  check_range("top_k_groups", "groups", scores.size(1), 0, kIndexMax);
}

void check_select(const at::Tensor& summary, const at::Tensor& query, int64_t group_tokens,
                  int64_t k) {
  check_shape("select_groups", "query", query, "[batch, rank]", {summary.size(0), summary.size(2)});
  check_dtype("select_groups", "query", query, at::kFloat);
  check_range("select_groups", "group_tokens", group_tokens, 1, kGroupTokensMax);
  check_range("select_groups", "k", k, 0, kIndexMax);
}

void check_token_bounds(const char* name, const at::Tensor& bounds, int64_t batch) {
  check_shape("select_groups", name, bounds, "[batch]", {batch});
  check_dtype("select_groups", name, bounds, at::kLong);
}

at::ScalarType check_project(const at::Tensor& keys, const at::Tensor& projection,
                             std::optional<at::ScalarType> summary_dtype) {
  check_shape("project_keys", "keys", keys, "[batch, kv_heads, tokens, head_dim]",
              {-1, -1, -1, -1});
  check_floating("project_keys", "keys", keys.scalar_type());
  check_shape("project_keys", "projection", projection, "[kv_heads * head_dim, rank]",
              {keys.size(1) * keys.size(3), -1});
  check_dtype("project_keys", "projection", projection, at::kFloat);
  const at::ScalarType type = summary_dtype.value_or(keys.scalar_type());
  if (type != at::kChar) check_floating("project_keys", "summary (unless int8)", type);
  return type;
}

}  // namespace kvswap
