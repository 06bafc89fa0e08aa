#include <limits>

#include "kernels/group_topk.h"
#include "kernels/kernel_test.h"
#include "kernels/low_rank_score.h"
#include "kernels/select_groups.h"

namespace kvswap {
namespace {

class SelectGroups : public KernelTest {};

/// The same choice as the three kernels one after another.
void expect_same_choice(SelectGroupsArgs args, int64_t blocks) {
  const auto summary = random_elements<float>(blocks * args.rank * kSummaryBlock, 1);
  const auto query = random_elements<float>(args.rank, 2);
  args.summary = summary.data();
  args.query = query.data();
  const int64_t groups = (args.last_token + args.group_tokens - 1) / args.group_tokens;
  std::vector<float> group_scores(groups), expected_scores(groups);
  std::vector<int32_t> chosen(args.k), expected(args.k);
  args.group_scores = group_scores.data();
  args.indices = chosen.data();
  chosen.resize(select_groups(args, {}));

  std::vector<float> scores(blocks * kSummaryBlock);
  low_rank_score({.summary = summary.data(),
                  .query = query.data(),
                  .scores = scores.data(),
                  .score_stride = blocks * kSummaryBlock,
                  .blocks = blocks,
                  .rank = args.rank,
                  .queries = 1});
  std::fill_n(scores.begin(), args.first_token, -std::numeric_limits<float>::infinity());
  group_max({.scores = scores.data(),
             .group_scores = expected_scores.data(),
             .tokens = args.last_token,
             .group_tokens = args.group_tokens});
  expected.resize(top_k({.scores = expected_scores.data(),
                         .indices = expected.data(),
                         .count = groups,
                         .k = args.k}));
  EXPECT_EQ(chosen, expected);
  EXPECT_EQ(group_scores, expected_scores);
}

TEST_P(SelectGroups, SameAsTheThreeKernels) {
  for (const int64_t group_tokens : {1, 3, 4, 7, 16, 64}) {
    for (const int64_t last_token : {0, 1, 100, 1024, 5000}) {
      for (const int64_t first_token : {0, 5, 1500}) {
        if (first_token > last_token) continue;
        expect_same_choice({.first_token = first_token,
                            .last_token = last_token,
                            .rank = 8,
                            .group_tokens = group_tokens,
                            .k = 40},
                           (last_token + kSummaryBlock - 1) / kSummaryBlock);
      }
    }
  }
}

KVSWAP_EVERY_LEVEL(SelectGroups);

}  // namespace
}  // namespace kvswap
