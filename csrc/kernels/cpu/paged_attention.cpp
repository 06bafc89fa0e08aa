#include "kernels/paged_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/paged_attention.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/paged_attention_tiles-inl.h"
#include "kernels/cpu/simd-inl.h"
#include "kernels/cpu/token_walk.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

/// Rows are (head of the group, query): hides what comes after the query's own column.
void hide_later_tokens(const PagedAttentionArgs& args, const AttentionState& state, const TokenWalk& walk,
                       int64_t tokens, int64_t first_column) {
  for (int64_t row = 0; row < state.rows; ++row) {
    float* scores = state.scores + row * kBlockTokens;
    const int64_t column = first_column + row % args.queries;
    for (int64_t t = 0; t < tokens; ++t) {
      if (walk.columns[t] > column) scores[t] = kNothing;
    }
  }
}

template <typename T>
void attend_block(const PagedAttentionArgs& args, const AttentionState& state, TokenWalk& walk,
                  int64_t tokens, int64_t first_column) {
  const int64_t head_dim = args.shape.head_dim;
  const int64_t value_offset = args.shape.group_tokens * head_dim * sizeof(T);
  const int64_t whole = (tokens + 3) / 4 * 4;
  std::fill(walk.keys + tokens, walk.keys + whole, walk.keys[tokens - 1]);
  int64_t row = 0;
  for (; row + kTileRows <= state.rows; row += kTileRows) {
    score_rows<T, kTileRows>(state, row, walk.keys, whole, head_dim);
  }
  for (; row < state.rows; ++row) score_rows<T, 1>(state, row, walk.keys, whole, head_dim);

  if (args.queries > 1) hide_later_tokens(args, state, walk, tokens, first_column);
  const int64_t padded = round_up_to_lanes(tokens);
  for (row = 0; row < state.rows; ++row) {
    float* scores = state.scores + row * kBlockTokens;
    std::fill(scores + tokens, scores + padded, kNothing);
    weigh_scores(state, row, args.scale, padded);
  }

  for (row = 0; row + kTileRows <= state.rows; row += kTileRows) {
    weigh_rows<T, kTileRows>(state, row, walk.keys, tokens, value_offset, head_dim);
  }
  for (; row < state.rows; ++row) {
    weigh_rows<T, 1>(state, row, walk.keys, tokens, value_offset, head_dim);
  }
}

template <typename T>
void load_query(const PagedAttentionArgs& args, const AttentionState& state, int64_t sequence,
                int64_t first_head) {
  for (int64_t row = 0; row < state.rows; ++row) {
    const T* source = static_cast<const T*>(args.query) + sequence * args.query_batch_stride +
                      (first_head + row / args.queries) * args.query_head_stride +
                      row % args.queries * args.query_token_stride;
    float* target = state.query + row * state.stride;
    for (int64_t d = 0; d < args.shape.head_dim; ++d) target[d] = to_float(source[d]);
  }
}

/// One row of the result, from its unnormalised sum in fp32.
template <typename T>
void store_output(const PagedAttentionArgs& args, int64_t sequence, int64_t head, int64_t query,
                  const float* values, float factor) {
  T* output = static_cast<T*>(args.output) +
              ((sequence * args.queries + query) * args.heads + head) * args.shape.head_dim;
  for (int64_t d = 0; d < args.shape.head_dim; ++d) output[d] = from_float<T>(values[d] * factor);
}

void store_log_sum_exp(const PagedAttentionArgs& args, int64_t sequence, int64_t head,
                       int64_t query, float value) {
  if (!args.log_sum_exp) return;
  args.log_sum_exp[(sequence * args.heads + head) * args.queries + query] = value;
}

/// Task = ((sequence * kv_heads) + kv_head) * parts + part.
template <typename T>
void attend(const PagedAttentionArgs& args, const AttentionPartials& partials, int64_t task) {
  const AttentionPartition cut(args);
  const int64_t part = task % cut.parts;
  const int64_t kv_head = task / cut.parts % cut.kv_heads;
  const int64_t sequence = task / cut.parts / cut.kv_heads;
  const int64_t table = sequence * args.table_heads + (args.table_heads == 1 ? 0 : kv_head);
  const int64_t head_in_page = args.shape.kv_heads == 1 ? 0 : kv_head;
  const int64_t head_dim = args.shape.head_dim;
  const int64_t first_head = kv_head * (args.heads / cut.kv_heads);
  const int64_t first_column = args.query_columns[sequence];

  const AttentionState state = make_attention_state(cut.rows, head_dim);
  load_query<T>(args, state, sequence, first_head);
  const int64_t pages = args.page_counts[table];
  const int64_t first_page = std::min(pages, part * std::min(cut.pages_per_part, pages));
  TokenWalk walk{.args = args,
                 .table = table,
                 .head_offset = head_in_page * 2 * args.shape.group_tokens * head_dim *
                                static_cast<int64_t>(sizeof(T)),
                 .page = first_page,
                 .last_page = first_page + std::min(cut.pages_per_part, pages - first_page),
                 .last_column = first_column + args.queries - 1};
  while (const int64_t tokens = walk.next()) {
    attend_block<T>(args, state, walk, tokens, first_column);
  }
  for (int64_t row = 0; row < cut.rows; ++row) {
    const float factor = state.sum[row] > 0.0f ? 1.0f / state.sum[row] : 0.0f;
    const float log_sum_exp =
        state.sum[row] > 0.0f ? state.largest[row] + std::log(state.sum[row]) : kNothing;
    const float* values = state.output + row * state.stride;
    if (cut.parts == 1) {
      const int64_t head = first_head + row / args.queries;
      store_output<T>(args, sequence, head, row % args.queries, values, factor);
      store_log_sum_exp(args, sequence, head, row % args.queries, log_sum_exp);
    } else {
      float* target = partials.output + (task * cut.rows + row) * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) target[d] = values[d] * factor;
      partials.log_sum_exp[task * cut.rows + row] = log_sum_exp;
    }
  }
}

/// Joins the parts of one (sequence, KV head), in rising order of pages.
template <typename T>
void merge_parts(const PagedAttentionArgs& args, const AttentionPartials& partials, int64_t task) {
  const AttentionPartition cut(args);
  const int64_t head_dim = args.shape.head_dim;
  const int64_t sequence = task / cut.kv_heads;
  const int64_t first_head = task % cut.kv_heads * (args.heads / cut.kv_heads);
  for (int64_t row = 0; row < cut.rows; ++row) {
    const int64_t first = task * cut.parts * cut.rows + row;
    float* values = partials.output + first * head_dim;
    float total = partials.log_sum_exp[first];
    for (int64_t part = 1; part < cut.parts; ++part) {
      const int64_t other = first + part * cut.rows;
      const float theirs = partials.log_sum_exp[other];
      if (theirs == kNothing) continue;
      const float larger = std::max(total, theirs);
      const float both = larger + std::log(std::exp(total - larger) + std::exp(theirs - larger));
      const float weight = std::exp(total - both);
      const float other_weight = std::exp(theirs - both);
      for (int64_t d = 0; d < head_dim; ++d) {
        values[d] = weight * values[d] + other_weight * partials.output[other * head_dim + d];
      }
      total = both;
    }
    const int64_t head = first_head + row / args.queries;
    store_output<T>(args, sequence, head, row % args.queries, values, 1.0f);
    store_log_sum_exp(args, sequence, head, row % args.queries, total);
  }
}

void attend_task(const PagedAttentionArgs& args, const AttentionPartials& partials, int64_t task) {
  switch (args.dtype) {
    case DType::kFloat32: return attend<float>(args, partials, task);
    case DType::kBFloat16: return attend<BFloat16>(args, partials, task);
    case DType::kFloat16: return attend<Float16>(args, partials, task);
    case DType::kInt8: return;
  }
}

void merge_task(const PagedAttentionArgs& args, const AttentionPartials& partials, int64_t task) {
  switch (args.dtype) {
    case DType::kFloat32: return merge_parts<float>(args, partials, task);
    case DType::kBFloat16: return merge_parts<BFloat16>(args, partials, task);
    case DType::kFloat16: return merge_parts<Float16>(args, partials, task);
    case DType::kInt8: return;
  }
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(attend_task);
KVSWAP_EXPORT(merge_task);

void paged_attention(const PagedAttentionArgs& args, const Execution& execution) {
  const AttentionPartition cut(args);
  const int64_t heads = args.batch * cut.kv_heads;
  thread_local std::vector<float> workspace;
  AttentionPartials partials;
  if (cut.parts > 1) {
    const int64_t rows = heads * cut.parts * cut.rows;
    workspace.resize(std::max<size_t>(workspace.size(), rows * (args.shape.head_dim + 1)));
    partials = {.output = workspace.data(),
                .log_sum_exp = workspace.data() + rows * args.shape.head_dim};
  }
  run_parallel(execution, heads * cut.parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      KVSWAP_DISPATCH(attend_task)(args, partials, task);
    }
  });
  if (cut.parts == 1) return;
  run_parallel(execution, heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      KVSWAP_DISPATCH(merge_task)(args, partials, task);
    }
  });
}

}  // namespace kvswap
#endif  // HWY_ONCE
