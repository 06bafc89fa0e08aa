#include "methods/mass_scorer.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/low_rank_score.h"
#include "methods/rows.h"

namespace kvswap {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int64_t kHeadsAtOnce = 8;  // whose logits of a chunk stay in the nearer caches

/// Logits of tokens that are no candidates become -inf.
void drop_others(const Candidates& candidates, int64_t first_token, int64_t tokens,
                 int64_t group_tokens, float* logits) {
  const TokenValidity& valid = *candidates.valid;
  const int64_t padded = std::min(tokens, valid.all_valid_from() - first_token);
  for (int64_t row = 0; row < padded; ++row) {
    if (!valid.is_valid(first_token + row)) logits[row] = kNever;
  }
  for (const int32_t group : candidates.excluded) {
    const int64_t begin = std::max<int64_t>(0, group * group_tokens - first_token);
    const int64_t end = std::min(tokens, (group + 1) * group_tokens - first_token);
    for (int64_t row = begin; row < end; ++row) logits[row] = kNever;
  }
}

/// One chunk of the summary: its logits, a few heads at a time, and their weights.
void weigh_piece(const MassArgs& args, int64_t piece, WeighGroupsArgs weigh) {
  const Summary& summary = *args.summary;
  const int64_t chunk_tokens = summary.shape().chunk_tokens;
  const int64_t rank = summary.shape().rank;
  const int64_t groups = weigh.tokens / weigh.group_tokens;
  const Summary::Chunk& source = summary.chunk(piece);
  KVSWAP_ASSERT(weigh.tokens <= summary.chunk_rows(piece));
  thread_local std::vector<float> logits;  // [heads at once, chunk_tokens]
  logits.resize(kHeadsAtOnce * chunk_tokens);
  weigh.logits = logits.data();
  weigh.logit_stride = chunk_tokens;
  for (int64_t head = 0; head < args.heads; head += kHeadsAtOnce) {
    weigh.heads = std::min(kHeadsAtOnce, args.heads - head);
    low_rank_score({.summary = source.rows.data(),
                    .token_scale = source.token_scale.empty() ? nullptr : source.token_scale.data(),
                    .query = args.query + head * rank,
                    .scores = logits.data(),
                    .score_stride = chunk_tokens,
                    .blocks = (weigh.tokens + kSummaryBlock - 1) / kSummaryBlock,
                    .rank = rank,
                    .queries = weigh.heads,
                    .dtype = summary.shape().dtype});
    for (int64_t i = 0; i < weigh.heads; ++i) {
      drop_others(*args.candidates, piece * chunk_tokens, weigh.tokens, weigh.group_tokens,
                  logits.data() + i * chunk_tokens);
    }
    weigh_groups(weigh);
    weigh.weights += weigh.heads * groups;
    weigh.largest += weigh.heads;
    weigh.sums += weigh.heads;
  }
}

}  // namespace

/// How a sequence is cut: a piece is a chunk of its summary.
struct MassScorer::Pieces {
  int64_t count = 0;
  int64_t groups = 0;   // of a piece
  int64_t weights = 0;  // [count][heads, groups of the piece]
};

MassScorer::Pieces MassScorer::pieces_of(int64_t heads, int64_t groups, int64_t group_tokens) {
  Pieces pieces;
  pieces.groups = chunk_rows(group_tokens, 1) / group_tokens;
  pieces.count = (groups + pieces.groups - 1) / pieces.groups;
  pieces.weights = heads * groups;
  return pieces;
}

int64_t MassScorer::scratch_bytes(int64_t heads, int64_t groups, int64_t group_tokens) {
  const Pieces pieces = pieces_of(heads, groups, group_tokens);
  return (pieces.weights + 3 * pieces.count * heads) * int64_t{sizeof(float)};
}

void MassScorer::score(const MassArgs& args, int64_t group_tokens, float* group_scores) {
  const Pieces pieces = pieces_of(args.heads, args.groups, group_tokens);
  const auto floats =
      static_cast<size_t>(scratch_bytes(args.heads, args.groups, group_tokens)) / sizeof(float);
  if (scratch_.size() < floats) {
    scratch_ = {};  // before the larger one comes
    scratch_.resize(floats);
  }
  float* largest = scratch_.data() + pieces.weights;  // [pieces, heads], as the next two
  float* sums = largest + pieces.count * args.heads;
  float* factors = sums + pieces.count * args.heads;
  const auto groups_in = [&](int64_t piece) {
    return std::min(pieces.groups, args.groups - piece * pieces.groups);
  };
  const auto weights_of = [&](int64_t piece) {
    return scratch_.data() + piece * pieces.groups * args.heads;
  };
  const Execution execution{.parallel = args.parallel};
  run_parallel(execution, pieces.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      weigh_piece(args, piece,
                  {.weights = weights_of(piece),
                   .largest = largest + piece * args.heads,
                   .sums = sums + piece * args.heads,
                   .tokens = groups_in(piece) * group_tokens,
                   .group_tokens = group_tokens});
    }
  });
  mass_factors({.largest = largest,
                .sums = sums,
                .kept_log_sum_exp = args.kept_log_sum_exp,
                .kept_stride = args.kept_stride,
                .factors = factors,
                .pieces = pieces.count,
                .heads = args.heads});
  run_parallel(execution, pieces.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      join_heads({.weights = weights_of(piece),
                  .factors = factors + piece * args.heads,
                  .group_scores = group_scores + piece * pieces.groups,
                  .groups = groups_in(piece),
                  .heads = args.heads,
                  .join = args.join});
    }
  });
}

}  // namespace kvswap
