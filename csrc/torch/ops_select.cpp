#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "kernels/group_mass.h"
#include "kernels/group_topk.h"
#include "kernels/int8_score.h"
#include "kernels/low_rank_score.h"
#include "kernels/project.h"
#include "kernels/select_groups.h"
#include "torch/op_checks.h"

namespace kvswap {
namespace {

/// A summary and, for int8, its scales: contiguous and checked.
struct KeySummary {
  KeySummary(const char* where, const at::Tensor& summary, const OptionalTensor& token_scale)
      : rows(summary.contiguous()) {
    check_summary(where, summary, token_scale);
    if (!token_scale) return;
    scales = token_scale->contiguous();
  }

  int64_t batch() const { return rows.size(0); }
  int64_t blocks() const { return rows.size(1); }
  int64_t rank() const { return rows.size(2); }
  int64_t tokens() const { return blocks() * kSummaryBlock; }
  DType dtype() const { return to_dtype(rows.scalar_type()); }

  const void* block(int64_t sequence, int64_t index) const {
    const int64_t offset = (sequence * blocks() + index) * rank() * kSummaryBlock;
    return static_cast<const char*>(rows.const_data_ptr()) + offset * rows.element_size();
  }
  const float* scale(int64_t sequence, int64_t index) const {
    if (!scales.defined()) return nullptr;
    return scales.const_data_ptr<float>() + (sequence * blocks() + index) * kSummaryBlock;
  }

  at::Tensor rows;
  at::Tensor scales;
};

at::Tensor low_rank_score_cpu(const at::Tensor& summary, const at::Tensor& query,
                              const OptionalTensor& token_scale) {
  const KeySummary source("low_rank_score", summary, token_scale);
  check_score(summary, query);
  const at::Tensor queries = query.contiguous();
  const int64_t count = query.size(1);
  at::Tensor scores = at::empty({source.batch(), count, source.tokens()}, query.options());
  constexpr int64_t kPieceBlocks = 64;
  const int64_t pieces = (source.blocks() + kPieceBlocks - 1) / kPieceBlocks;
  run_parallel(torch_execution(), source.batch() * pieces, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t sequence = i / pieces;
      const int64_t first = i % pieces * kPieceBlocks;
      low_rank_score({.summary = source.block(sequence, first),
                      .token_scale = source.scale(sequence, first),
                      .query = queries.const_data_ptr<float>() + sequence * count * source.rank(),
                      .scores = scores.data_ptr<float>() + sequence * count * source.tokens() +
                                first * kSummaryBlock,
                      .score_stride = source.tokens(),
                      .blocks = std::min(kPieceBlocks, source.blocks() - first),
                      .rank = source.rank(),
                      .queries = count,
                      .dtype = source.dtype()});
    }
  });
  return scores;
}

at::Tensor group_max_cpu(const at::Tensor& scores, int64_t group_tokens) {
  check_group_max(scores, group_tokens);
  const at::Tensor source = scores.contiguous();
  const int64_t tokens = scores.size(1);
  const int64_t groups = (tokens + group_tokens - 1) / group_tokens;
  at::Tensor maxima = at::empty({scores.size(0), groups}, scores.options());
  run_parallel(torch_execution(), scores.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      group_max({.scores = source.const_data_ptr<float>() + i * tokens,
                 .group_scores = maxima.data_ptr<float>() + i * groups,
                 .tokens = tokens,
                 .group_tokens = group_tokens});
    }
  });
  return maxima;
}

/// Products of one sequence's tokens with its queries, [queries, tokens], as a score by mass has
/// them: int8 rows meet int8 queries.
void head_products(const KeySummary& source, int64_t sequence, const float* query, int64_t queries,
                   float* products) {
  if (source.dtype() != DType::kInt8) {
    low_rank_score({.summary = source.block(sequence, 0),
                    .query = query,
                    .scores = products,
                    .score_stride = source.tokens(),
                    .blocks = source.blocks(),
                    .rank = source.rank(),
                    .queries = queries,
                    .dtype = source.dtype()});
    return;
  }
  std::vector<int8_t> levels(queries * int8_stride(source.rank()));
  std::vector<float> scales(queries);
  quantize_queries({.query = query,
                    .quantized = levels.data(),
                    .scales = scales.data(),
                    .rank = source.rank(),
                    .queries = queries});
  int8_score({.summary = static_cast<const int8_t*>(source.block(sequence, 0)),
              .token_scale = source.scale(sequence, 0),
              .query = levels.data(),
              .scores = products,
              .score_stride = source.tokens(),
              .blocks = source.blocks(),
              .rank = source.rank(),
              .queries = queries});
  for (int64_t i = 0; i < queries * source.tokens(); ++i)
    products[i] *= scales[i / source.tokens()];
}

/// They know nothing: all of their logits [heads, tokens] are -inf.
void forget_heads_without_numbers(const float* query, int64_t rank, std::vector<float>& logits,
                                  int64_t heads) {
  const auto tokens = static_cast<int64_t>(logits.size()) / std::max<int64_t>(1, heads);
  for (int64_t head = 0; head < heads; ++head) {
    const float* own = query + head * rank;
    if (std::all_of(own, own + rank, [](float number) { return std::isfinite(number); })) continue;
    std::fill_n(logits.begin() + head * tokens, tokens, -std::numeric_limits<float>::infinity());
  }
}

at::Tensor group_mass_cpu(const at::Tensor& summary, const at::Tensor& query, int64_t group_tokens,
                          c10::string_view join, const OptionalTensor& token_scale) {
  const KeySummary source("group_mass", summary, token_scale);
  const HeadJoin joined = check_mass(summary, query, group_tokens, join);
  const at::Tensor queries = query.contiguous();
  const int64_t heads = query.size(1);
  const int64_t groups = (source.tokens() + group_tokens - 1) / group_tokens;
  at::Tensor masses = at::empty({source.batch(), groups}, query.options());
  run_parallel(torch_execution(), source.batch(), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> logits(heads * source.tokens());
    for (int64_t i = begin; i < end; ++i) {
      const float* own = queries.const_data_ptr<float>() + i * heads * source.rank();
      head_products(source, i, own, heads, logits.data());
      forget_heads_without_numbers(own, source.rank(), logits, heads);
      group_mass({.logits = logits.data(),
                  .group_scores = masses.data_ptr<float>() + i * groups,
                  .tokens = source.tokens(),
                  .group_tokens = group_tokens,
                  .heads = heads,
                  .join = joined});
    }
  });
  return masses;
}

/// Room for k choices of each sequence, none made yet.
std::tuple<at::Tensor, at::Tensor> no_choices(int64_t batch, int64_t k) {
  return {at::full({batch, k}, -1, at::kInt), at::zeros({batch}, at::kInt)};
}

std::tuple<at::Tensor, at::Tensor> top_k_groups_cpu(const at::Tensor& scores, int64_t k) {
  check_top_k(scores, k);
  const at::Tensor source = scores.contiguous();
  auto [indices, counts] = no_choices(scores.size(0), k);
  int32_t* chosen = indices.data_ptr<int32_t>();
  int32_t* chosen_counts = counts.data_ptr<int32_t>();
  run_parallel(torch_execution(), scores.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      chosen_counts[i] =
          static_cast<int32_t>(top_k({.scores = source.const_data_ptr<float>() + i * source.size(1),
                                      .indices = chosen + i * k,
                                      .count = source.size(1),
                                      .k = k}));
    }
  });
  return {indices, counts};
}

/// One token position per sequence, or `otherwise` for all.
at::Tensor token_bounds(const char* name, const OptionalTensor& bounds, int64_t otherwise,
                        const KeySummary& summary) {
  if (!bounds) return at::full({summary.batch()}, otherwise, at::kLong);
  check_token_bounds(name, *bounds, summary.batch());
  const at::Tensor contiguous = bounds->contiguous();
  for (int64_t i = 0; i < summary.batch(); ++i) {
    check_range("select_groups", name, contiguous.const_data_ptr<int64_t>()[i], 0,
                summary.tokens());
  }
  return contiguous;
}

std::tuple<at::Tensor, at::Tensor> select_groups_cpu(const at::Tensor& summary,
                                                     const at::Tensor& query, int64_t group_tokens,
                                                     int64_t k, const OptionalTensor& token_scale,
                                                     const OptionalTensor& first_tokens,
                                                     const OptionalTensor& last_tokens) {
  const KeySummary source("select_groups", summary, token_scale);
  check_select(summary, query, group_tokens, k);
  const at::Tensor queries = query.contiguous();
  const at::Tensor first = token_bounds("first_tokens", first_tokens, 0, source);
  const at::Tensor last = token_bounds("last_tokens", last_tokens, source.tokens(), source);
  const int64_t groups = (source.tokens() + group_tokens - 1) / group_tokens;
  at::Tensor group_scores = at::empty({groups}, at::kFloat);
  auto [indices, counts] = no_choices(source.batch(), k);
  for (int64_t i = 0; i < source.batch(); ++i) {
    counts.data_ptr<int32_t>()[i] = static_cast<int32_t>(
        select_groups({.summary = source.block(i, 0),
                       .token_scale = source.scale(i, 0),
                       .query = queries.const_data_ptr<float>() + i * source.rank(),
                       .group_scores = group_scores.data_ptr<float>(),
                       .indices = indices.data_ptr<int32_t>() + i * k,
                       .first_token = first.const_data_ptr<int64_t>()[i],
                       .last_token = last.const_data_ptr<int64_t>()[i],
                       .rank = source.rank(),
                       .group_tokens = group_tokens,
                       .k = k,
                       .dtype = source.dtype()},
                      torch_execution()));
  }
  return {indices, counts};
}

std::tuple<at::Tensor, at::Tensor> project_keys_cpu(const at::Tensor& keys,
                                                    const at::Tensor& projection,
                                                    std::optional<at::ScalarType> summary_dtype) {
  const at::ScalarType type = check_project(keys, projection, summary_dtype);
  const bool is_int8 = type == at::kChar;
  const int64_t batch = keys.size(0);
  const int64_t tokens = keys.size(2);
  const int64_t rank = projection.size(1);
  const int64_t blocks = (tokens + kSummaryBlock - 1) / kSummaryBlock;
  at::Tensor summary = at::zeros({batch, blocks, rank, kSummaryBlock}, keys.options().dtype(type));
  at::Tensor token_scale =
      is_int8 ? at::zeros({batch, blocks, kSummaryBlock}, at::kFloat) : at::empty({0}, at::kFloat);
  const at::Tensor source = with_contiguous_rows(keys);
  const at::Tensor factors = projection.contiguous();
  constexpr int64_t kPieceTokens = 256;
  const int64_t pieces = (tokens + kPieceTokens - 1) / kPieceTokens;
  run_parallel(torch_execution(), batch * pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t sequence = i / pieces;
      const int64_t first = i % pieces * kPieceTokens;
      const int64_t offset = sequence * source.stride(0) + first * source.stride(2);
      project_keys(
          {.keys =
               static_cast<const char*>(source.const_data_ptr()) + offset * source.element_size(),
           .head_stride = source.stride(1),
           .token_stride = source.stride(2),
           .projection = factors.const_data_ptr<float>(),
           .summary = static_cast<char*>(summary.data_ptr()) +
                      sequence * summary.stride(0) * summary.element_size(),
           .token_scale =
               is_int8 ? token_scale.data_ptr<float>() + sequence * token_scale.stride(0) : nullptr,
           .first_row = first,
           .tokens = std::min(kPieceTokens, tokens - first),
           .kv_heads = keys.size(1),
           .head_dim = keys.size(3),
           .rank = rank,
           .key_dtype = to_dtype(keys.scalar_type()),
           .summary_dtype = to_dtype(type)});
    }
  });
  return {summary, token_scale};
}

}  // namespace

TORCH_LIBRARY_IMPL(kvswap_torch, CPU, library) {
  library.impl("low_rank_score", low_rank_score_cpu);
  library.impl("group_max", group_max_cpu);
  library.impl("group_mass", group_mass_cpu);
  library.impl("top_k_groups", top_k_groups_cpu);
  library.impl("select_groups", select_groups_cpu);
  library.impl("project_keys", project_keys_cpu);
}

}  // namespace kvswap
