#include "device/host_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/group_mass.h"
#include "kernels/group_topk.h"
#include "kernels/int8_score.h"
#include "kernels/low_rank_score.h"
#include "kernels/project.h"
#include "kernels/records.h"

namespace kvswap::host_kernels {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

bool is_valid(const cuda::BatchSelectArgs& args, int64_t sequence, int64_t token) {
  if (args.first_tokens != nullptr && token < args.first_tokens[sequence]) return false;
  if (args.last_tokens != nullptr && token >= args.last_tokens[sequence]) return false;
  if (args.valid == nullptr) return true;
  return (args.valid[sequence * args.valid_stride + token / 64] >> (token % 64)) & 1;
}

/// Scores of all groups of one sequence: [queries, groups].
void score(const cuda::BatchSelectArgs& args, int64_t sequence, float* group_scores) {
  const cuda::SummaryTable& summary = args.summary;
  std::vector<float> tokens(args.queries * summary.chunk_tokens);
  for (int64_t first = 0, chunk = 0; first < args.groups * args.group_tokens;
       first += summary.chunk_tokens, ++chunk) {
    const int64_t rows = std::min(summary.chunk_tokens, args.groups * args.group_tokens - first);
    const int64_t source = sequence * summary.chunks_max + chunk;
    LowRankScoreArgs scores;
    scores.summary = summary.chunks[source];
    scores.token_scale = summary.scales == nullptr ? nullptr : summary.scales[source];
    scores.query = args.query + sequence * args.queries * summary.rank;
    scores.scores = tokens.data();
    scores.score_stride = summary.chunk_tokens;
    scores.blocks = (rows + kSummaryBlock - 1) / kSummaryBlock;
    scores.rank = summary.rank;
    scores.queries = args.queries;
    scores.dtype = summary.dtype;
    low_rank_score(scores);
    for (int64_t query = 0; query < args.queries; ++query) {
      float* of_query = tokens.data() + query * summary.chunk_tokens;
      for (int64_t row = 0; row < rows; ++row) {
        if (!is_valid(args, sequence, first + row)) of_query[row] = kNever;
      }
      group_max({.scores = of_query,
                 .group_scores = group_scores + query * args.groups + first / args.group_tokens,
                 .tokens = rows,
                 .group_tokens = args.group_tokens});
    }
  }
}

/// The products of one head's query with a sequence's tokens, times what makes them logits.
void multiply(const cuda::BatchSelectArgs& args, int64_t sequence, const float* query,
              float* logits) {
  const cuda::SummaryTable& summary = args.summary;
  const int64_t tokens = args.groups * args.group_tokens;
  std::vector<float> own(query, query + summary.rank);
  float scale = 1.0f;
  if (summary.dtype == DType::kInt8) {
    std::vector<int8_t> levels(int8_stride(summary.rank));
    quantize_queries({.query = query,
                      .quantized = levels.data(),
                      .scales = &scale,
                      .rank = summary.rank,
                      .queries = 1});
    std::copy_n(levels.begin(), summary.rank, own.begin());
  }
  std::vector<float> scores(summary.chunk_tokens);
  // A head that is no number knows nothing.
  const bool is_number =
      std::all_of(query, query + summary.rank, [](float number) { return std::isfinite(number); });
  if (!is_number) return static_cast<void>(std::fill_n(logits, tokens, kNever));
  for (int64_t first = 0, chunk = 0; first < tokens; first += summary.chunk_tokens, ++chunk) {
    const int64_t source = sequence * summary.chunks_max + chunk;
    const int64_t rows = std::min(summary.chunk_tokens, tokens - first);
    low_rank_score({.summary = summary.chunks[source],
                    .token_scale = summary.scales == nullptr ? nullptr : summary.scales[source],
                    .query = own.data(),
                    .scores = scores.data(),
                    .score_stride = summary.chunk_tokens,
                    .blocks = (rows + kSummaryBlock - 1) / kSummaryBlock,
                    .rank = summary.rank,
                    .queries = 1,
                    .dtype = summary.dtype});
    for (int64_t row = 0; row < rows; ++row) {
      const bool is_candidate = is_valid(args, sequence, first + row);
      logits[first + row] = is_candidate ? scores[row] * scale : kNever;
    }
  }
}

/// The same by mass.
void score_by_mass(const cuda::BatchSelectArgs& args, int64_t sequence, float* group_scores) {
  const int64_t tokens = args.groups * args.group_tokens;
  float* logits = group_scores + args.queries * args.groups;  // [heads, tokens]
  for (int64_t query = 0; query < args.queries; ++query) {
    for (int64_t head = 0; head < args.heads; ++head) {
      const int64_t row = (sequence * args.queries + query) * args.heads + head;
      float* own = logits + head * tokens;
      multiply(args, sequence, args.query + row * args.summary.rank, own);
      for (int64_t i = 0; i < args.excluded_max; ++i) {
        const int32_t group = args.excluded[sequence * args.excluded_max + i];
        if (group < 0 || group >= args.groups) continue;
        std::fill_n(own + group * args.group_tokens, args.group_tokens, kNever);
      }
    }
    group_mass({.logits = logits,
                .group_scores = group_scores + query * args.groups,
                .tokens = tokens,
                .group_tokens = args.group_tokens,
                .heads = args.heads,
                .join = args.join});
  }
}

}  // namespace

void project_keys(const cuda::BatchProjectKeysArgs& args) {
  for (int64_t i = 0; i < args.count; ++i) {
    const cuda::ProjectPiece& piece = args.pieces[i];
    kvswap::project_keys({.keys = piece.keys,
                          .head_stride = args.head_stride,
                          .token_stride = args.token_stride,
                          .projection = args.projection,
                          .summary = piece.summary,
                          .token_scale = piece.token_scale,
                          .first_row = piece.first_row,
                          .tokens = piece.tokens,
                          .kv_heads = args.kv_heads,
                          .head_dim = args.head_dim,
                          .rank = args.rank,
                          .key_dtype = args.key_dtype,
                          .summary_dtype = args.summary_dtype});
  }
}

void project_query(const cuda::BatchProjectQueryArgs& args) {
  const bool is_each = args.projects == cuda::QueryHeads::kEach;
  const int64_t heads = is_each ? args.heads : 1;
  for (int64_t i = 0; i < args.batch * args.queries * heads; ++i) {
    const int64_t row = i / heads;
    const int64_t head = i % heads;
    const int64_t sequence = row / args.queries;
    const int64_t part = sequence % args.heads_apart;
    const int64_t offset = sequence / args.heads_apart * args.batch_stride +
                           (part * args.heads + head) * args.head_stride +
                           row % args.queries * args.query_stride;
    const int64_t kv_head =
        part * args.kv_heads + (is_each ? head / (args.heads / args.kv_heads) : 0);
    const auto* query = static_cast<const std::byte*>(args.query);
    float* projected = args.projected + i * args.rank;
    kvswap::project_query({.query = query + offset * dtype_bytes(args.dtype),
                           .head_stride = args.head_stride,
                           .projection = args.projection + kv_head * args.head_dim * args.rank,
                           .projected = projected,
                           .heads = is_each ? 1 : args.heads,
                           .kv_heads = is_each ? 1 : args.kv_heads,
                           .head_dim = args.head_dim,
                           .rank = args.rank,
                           .dtype = args.dtype});
    for (int64_t r = 0; is_each && r < args.rank; ++r) projected[r] *= args.factor;
  }
}

void summarize_groups(const cuda::BatchSummarizeArgs& args) {
  for (int64_t i = 0; i < args.count; ++i) {
    const cuda::GroupPiece& piece = args.pieces[i];
    kvswap::summarize_groups({.keys = piece.keys,
                              .head_stride = args.head_stride,
                              .token_stride = args.token_stride,
                              .valid = piece.valid,
                              .summary = piece.summary,
                              .row_scale = piece.row_scale,
                              .first_row = piece.first_row,
                              .groups = piece.groups,
                              .group_tokens = args.group_tokens,
                              .kv_heads = args.kv_heads,
                              .head_dim = args.head_dim,
                              .row = args.row,
                              .key_dtype = args.key_dtype,
                              .summary_dtype = args.summary_dtype});
  }
}

void ask_groups(const cuda::BatchAskArgs& args) {
  const int64_t width = numbers_of(args.row) * args.kv_heads * args.head_dim;
  for (int64_t i = 0; i < args.batch * args.queries; ++i) {
    const int64_t sequence = i / args.queries;
    const int64_t offset = sequence / args.heads_apart * args.batch_stride +
                           sequence % args.heads_apart * args.heads * args.head_stride +
                           i % args.queries * args.query_stride;
    kvswap::ask_groups(
        {.query = static_cast<const std::byte*>(args.query) + offset * dtype_bytes(args.dtype),
         .head_stride = args.head_stride,
         .asked = args.asked + i * width,
         .heads = args.heads,
         .last_head = args.heads,
         .kv_heads = args.kv_heads,
         .head_dim = args.head_dim,
         .row = args.row,
         .weight = args.weight,
         .dtype = args.dtype});
  }
}

/// For each sequence [queries, groups] scores; by mass its logits beside them.
int64_t select_groups_scratch_bytes(const cuda::BatchSelectArgs& args) {
  const int64_t logits = args.heads * args.groups * args.group_tokens;
  return (args.queries * args.groups + logits) * int64_t{sizeof(float)};
}

void select_groups(const cuda::BatchSelectArgs& args) {
  auto* group_scores = static_cast<float*>(args.scratch);
  for (int64_t sequence = 0; sequence < args.batch; ++sequence) {
    args.heads > 0 ? score_by_mass(args, sequence, group_scores)
                   : score(args, sequence, group_scores);
    for (int64_t query = 0; query < args.queries; ++query) {
      const int64_t row = sequence * args.queries + query;
      float* scores = group_scores + query * args.groups;
      for (int64_t i = 0; i < args.excluded_max; ++i) {
        const int32_t group = args.excluded[sequence * args.excluded_max + i];
        if (group >= 0 && group < args.groups) scores[group] = kNever;
      }
      int32_t* indices = args.indices + row * args.k;
      const int64_t wanted = args.wanted == nullptr ? args.k : args.wanted[row];
      const int64_t chosen = top_k({.scores = scores,
                                    .indices = indices,
                                    .count = args.groups,
                                    .k = std::min({wanted, args.k, args.groups})});
      std::fill(indices + chosen, indices + args.k, -1);
      args.chosen[row] = static_cast<int32_t>(chosen);
    }
  }
}

void pack_records(const cuda::BatchTransferArgs& args) {
  const int64_t bytes = args.shape.element_bytes;
  for (int64_t i = 0; i < args.count; ++i) {
    const int64_t sequence = args.sequences == nullptr ? 0 : args.sequences[i];
    TokenView tokens = args.tokens;
    tokens.keys = static_cast<std::byte*>(tokens.keys) + args.key_offset(sequence) * bytes;
    tokens.values = static_cast<std::byte*>(tokens.values) + args.value_offset(sequence) * bytes;
    kvswap::pack_records({.shape = args.shape,
                          .tokens = tokens,
                          .records = args.records + i,
                          .first_tokens = args.first_tokens + i,
                          .slots = args.slots == nullptr ? nullptr : args.slots + i,
                          .lengths = args.lengths == nullptr ? nullptr : args.lengths + i,
                          .count = 1});
  }
}

void copy_records(const cuda::CopyRecordsArgs& args) {
  for (int64_t i = 0; i < args.count; ++i) {
    const int64_t from =
        args.source_offsets == nullptr ? i * args.source_stride : args.source_offsets[i];
    void* to = args.targets != nullptr
                   ? args.targets[i]
                   : static_cast<std::byte*>(args.target) + i * args.target_stride;
    std::memcpy(to, static_cast<const std::byte*>(args.source) + from, args.bytes);
  }
}

}  // namespace kvswap::host_kernels
