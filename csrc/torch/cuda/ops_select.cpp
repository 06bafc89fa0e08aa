#include <ATen/core/Tensor.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "kernels/cuda/kernels.h"
#include "torch/cuda/device_call.h"

namespace kvswap {
namespace {

using TensorPair = std::tuple<at::Tensor, at::Tensor>;

/// A summary and, for int8, its scales: contiguous and checked, a chunk for each sequence.
struct KeySummary {
  KeySummary(const char* where, const at::Tensor& summary, const OptionalTensor& token_scale)
      : rows(aligned(summary)) {
    check_summary(where, summary, token_scale);
    chunks = addresses(rows, tokens() * rank() * rows.element_size(), batch());
    if (!token_scale) return;
    TORCH_CHECK_VALUE(token_scale->device() == rows.device(), where, ": token_scale must be on ",
                      rows.device(), ", got ", token_scale->device());
    scales = token_scale->contiguous();
    scale_chunks = addresses(scales, tokens() * scales.element_size(), batch());
  }

  int64_t batch() const { return rows.size(0); }
  int64_t blocks() const { return rows.size(1); }
  int64_t rank() const { return rows.size(2); }
  int64_t tokens() const { return blocks() * kSummaryBlock; }

  cuda::SummaryTable table() const {
    return {.chunks = address_table<const void*>(chunks),
            .scales = scales.defined() ? address_table<const float*>(scale_chunks) : nullptr,
            .chunks_max = 1,
            .chunk_tokens = tokens(),
            .rank = rank(),
            .dtype = to_dtype(rows.scalar_type())};
  }

  at::Tensor rows, chunks;
  at::Tensor scales, scale_chunks;
};

at::Tensor low_rank_score_cuda(const at::Tensor& summary, const at::Tensor& query,
                               const OptionalTensor& token_scale) {
  const DeviceCall call("low_rank_score", summary, {{"query", &query}});
  const KeySummary source("low_rank_score", summary, token_scale);
  check_score(summary, query);
  const at::Tensor queries = query.contiguous();
  at::Tensor scores = at::empty({source.batch(), query.size(1), source.tokens()}, query.options());
  check_status(cuda::low_rank_score({.summary = source.table(),
                                     .query = queries.const_data_ptr<float>(),
                                     .scores = scores.data_ptr<float>(),
                                     .batch = source.batch(),
                                     .queries = query.size(1),
                                     .tokens = source.tokens()},
                                    call.stream()));
  return scores;
}

at::Tensor group_max_cuda(const at::Tensor& scores, int64_t group_tokens) {
  const DeviceCall call("group_max", scores, {});
  check_group_max(scores, group_tokens);
  const at::Tensor source = scores.contiguous();
  const int64_t groups = (scores.size(1) + group_tokens - 1) / group_tokens;
  at::Tensor maxima = at::empty({scores.size(0), groups}, scores.options());
  check_status(cuda::group_max({.scores = source.const_data_ptr<float>(),
                                .group_scores = maxima.data_ptr<float>(),
                                .rows = scores.size(0),
                                .tokens = scores.size(1),
                                .group_tokens = group_tokens},
                               call.stream()));
  return maxima;
}

TensorPair top_k_groups_cuda(const at::Tensor& scores, int64_t k) {
  const DeviceCall call("top_k_groups", scores, {});
  check_top_k(scores, k);
  const at::Tensor source = scores.contiguous();
  const int64_t rows = scores.size(0);
  at::Tensor indices = at::empty({rows, k}, scores.options().dtype(at::kInt));
  at::Tensor counts = at::empty({rows}, scores.options().dtype(at::kInt));
  const at::Tensor scratch =
      make_scratch(cuda::top_k_scratch_bytes(rows, scores.size(1), k), scores);
  check_status(cuda::top_k({.scores = source.const_data_ptr<float>(),
                            .indices = indices.data_ptr<int32_t>(),
                            .chosen = counts.data_ptr<int32_t>(),
                            .rows = rows,
                            .row_stride = scores.size(1),
                            .count = scores.size(1),
                            .k = k,
                            .scratch = scratch.data_ptr()},
                           call.stream()));
  return {indices, counts};
}

/// One token position per sequence, or `otherwise` for all. Their range is checked on the device.
at::Tensor token_bounds(const char* name, const OptionalTensor& bounds, int64_t otherwise,
                        const KeySummary& summary) {
  const auto options = summary.rows.options().dtype(at::kLong);
  if (!bounds) return at::full({summary.batch()}, otherwise, options);
  check_token_bounds(name, *bounds, summary.batch());
  TORCH_CHECK_VALUE(bounds->device() == summary.rows.device(), "select_groups: ", name,
                    " must be on ", summary.rows.device(), ", got ", bounds->device());
  at::_assert_async(bounds->ge(0).logical_and(bounds->le(summary.tokens())).all(),
                    "select_groups: first_tokens and last_tokens must lie within the summary");
  return bounds->contiguous();
}

TensorPair select_groups_cuda(const at::Tensor& summary, const at::Tensor& query,
                              int64_t group_tokens, int64_t k, const OptionalTensor& token_scale,
                              const OptionalTensor& first_tokens,
                              const OptionalTensor& last_tokens) {
  const DeviceCall call("select_groups", summary, {{"query", &query}});
  const KeySummary source("select_groups", summary, token_scale);
  check_select(summary, query, group_tokens, k);
  const at::Tensor queries = query.contiguous();
  const at::Tensor first = token_bounds("first_tokens", first_tokens, 0, source);
  const at::Tensor last = token_bounds("last_tokens", last_tokens, source.tokens(), source);
  const int64_t groups = (source.tokens() + group_tokens - 1) / group_tokens;
  at::Tensor indices = at::empty({source.batch(), k}, query.options().dtype(at::kInt));
  at::Tensor counts = at::empty({source.batch()}, query.options().dtype(at::kInt));
  cuda::BatchSelectArgs args;
  args.summary = source.table();
  args.query = queries.const_data_ptr<float>();
  args.first_tokens = first.const_data_ptr<int64_t>();
  args.last_tokens = last.const_data_ptr<int64_t>();
  args.indices = indices.data_ptr<int32_t>();
  args.chosen = counts.data_ptr<int32_t>();
  args.batch = source.batch();
  args.queries = 1;
  args.groups = groups;
  args.group_tokens = group_tokens;
  args.k = k;
  const at::Tensor scratch = make_scratch(cuda::select_groups_scratch_bytes(args), query);
  args.scratch = scratch.data_ptr();
  check_status(cuda::select_groups(args, call.stream()));
  return {indices, counts};
}

at::Tensor group_mass_cuda(const at::Tensor& summary, const at::Tensor& query, int64_t group_tokens,
                           c10::string_view join, const OptionalTensor& token_scale) {
  const DeviceCall call("group_mass", summary, {{"query", &query}});
  const KeySummary source("group_mass", summary, token_scale);
  const HeadJoin joined = check_mass(summary, query, group_tokens, join);
  const at::Tensor queries = query.contiguous();
  const at::Tensor last =
      at::full({source.batch()}, source.tokens(), summary.options().dtype(at::kLong));
  const int64_t groups = (source.tokens() + group_tokens - 1) / group_tokens;
  at::Tensor masses = at::empty({source.batch(), groups}, query.options());
  cuda::BatchMassArgs args;
  args.select.summary = source.table();
  args.select.query = queries.const_data_ptr<float>();
  args.select.heads = query.size(1);
  args.select.join = joined;
  args.select.last_tokens = last.const_data_ptr<int64_t>();
  args.select.batch = source.batch();
  args.select.queries = 1;
  args.select.groups = groups;
  args.select.group_tokens = group_tokens;
  args.group_scores = masses.data_ptr<float>();
  args.score_stride = groups;
  const at::Tensor scratch = make_scratch(cuda::mass_scores_scratch_bytes(args.select), query);
  args.scratch = scratch.data_ptr();
  check_status(cuda::mass_scores(args, call.stream()));
  return masses;
}

TensorPair project_keys_cuda(const at::Tensor& keys, const at::Tensor& projection,
                             std::optional<at::ScalarType> summary_dtype) {
  const DeviceCall call("project_keys", keys, {{"projection", &projection}});
  const at::ScalarType type = check_project(keys, projection, summary_dtype);
  const bool is_int8 = type == at::kChar;
  const int64_t batch = keys.size(0);
  const int64_t tokens = keys.size(2);
  const int64_t rank = projection.size(1);
  const int64_t blocks = (tokens + kSummaryBlock - 1) / kSummaryBlock;
  const auto floats = keys.options().dtype(at::kFloat);
  at::Tensor summary = at::zeros({batch, blocks, rank, kSummaryBlock}, keys.options().dtype(type));
  at::Tensor token_scale =
      is_int8 ? at::zeros({batch, blocks, kSummaryBlock}, floats) : at::empty({0}, floats);
  if (batch == 0 || tokens == 0) return {summary, token_scale};
  const at::Tensor source = with_contiguous_rows(keys);
  const at::Tensor factors = projection.contiguous();
  // ProjectPiece, field by field.
  static_assert(sizeof(cuda::ProjectPiece) == 5 * sizeof(int64_t));
  const int64_t scale_stride = is_int8 ? blocks * kSummaryBlock * token_scale.element_size() : 0;
  const at::Tensor pieces =
      at::stack({addresses(source, source.stride(0) * source.element_size(), batch),
                 addresses(summary, blocks * rank * kSummaryBlock * summary.element_size(), batch),
                 addresses(token_scale, scale_stride, batch), at::zeros_like(counted(batch, keys)),
                 at::full_like(counted(batch, keys), tokens)},
                1);
  check_status(cuda::project_keys({.pieces = address_table<const cuda::ProjectPiece>(pieces),
                                   .count = batch,
                                   .tokens_max = tokens,
                                   .head_stride = source.stride(1),
                                   .token_stride = source.stride(2),
                                   .projection = factors.const_data_ptr<float>(),
                                   .kv_heads = keys.size(1),
                                   .head_dim = keys.size(3),
                                   .rank = rank,
                                   .key_dtype = to_dtype(keys.scalar_type()),
                                   .summary_dtype = to_dtype(type)},
                                  call.stream()));
  return {summary, token_scale};
}

}  // namespace

TORCH_LIBRARY_IMPL(kvswap_torch, CUDA, library) {
  library.impl("low_rank_score", low_rank_score_cuda);
  library.impl("group_max", group_max_cuda);
  library.impl("group_mass", group_mass_cuda);
  library.impl("top_k_groups", top_k_groups_cuda);
  library.impl("select_groups", select_groups_cuda);
  library.impl("project_keys", project_keys_cuda);
}

}  // namespace kvswap
