#include "kernels/select_groups.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/group_topk.h"
#include "kernels/low_rank_score.h"

namespace kvswap {
namespace {

/// Scores tokens [begin, end), which begin at a block and a group, and reduces them to groups.
void score_piece(const SelectGroupsArgs& args, int64_t begin, int64_t end) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  const int64_t first_block = begin / kSummaryBlock;
  const int64_t blocks = (end - begin + kSummaryBlock - 1) / kSummaryBlock;
  const int64_t block_bytes = args.rank * kSummaryBlock * dtype_bytes(args.dtype);
  thread_local std::vector<float> scores;
  scores.resize(blocks * kSummaryBlock);
  low_rank_score({.summary = static_cast<const char*>(args.summary) + first_block * block_bytes,
                  .token_scale = args.token_scale ? args.token_scale + begin : nullptr,
                  .query = args.query,
                  .scores = scores.data(),
                  .score_stride = blocks * kSummaryBlock,
                  .blocks = blocks,
                  .rank = args.rank,
                  .queries = 1,
                  .dtype = args.dtype});
  if (args.first_token > begin) {
    std::fill_n(scores.begin(), std::min(args.first_token, end) - begin, kNever);
  }
  group_max({.scores = scores.data(),
             .group_scores = args.group_scores + begin / args.group_tokens,
             .tokens = end - begin,
             .group_tokens = args.group_tokens});
}

}  // namespace

int64_t select_groups(const SelectGroupsArgs& args, const Execution& execution) {
  constexpr int64_t kPieceTokens = 1024;  // about: whole blocks and whole groups
  const int64_t unit = std::lcm(kSummaryBlock, args.group_tokens);
  const int64_t piece = (kPieceTokens + unit - 1) / unit * unit;
  const int64_t pieces = (args.last_token + piece - 1) / piece;
  run_parallel(execution, pieces, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      score_piece(args, i * piece, std::min((i + 1) * piece, args.last_token));
    }
  });
  const int64_t groups = (args.last_token + args.group_tokens - 1) / args.group_tokens;
  return top_k(
      {.scores = args.group_scores, .indices = args.indices, .count = groups, .k = args.k});
}

}  // namespace kvswap
