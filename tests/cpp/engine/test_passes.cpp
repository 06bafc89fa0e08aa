// What a pass is, is said: nothing follows from its length but whether it may decode.

#include "engine_run.h"

namespace kvswap {
namespace {

/// Past what is chosen from, with projections.
void read_prompt(EngineRun& run) {
  run.forward(2, 100);
  for (const int64_t layer : {0, 1}) ASSERT_TRUE(run.set_projection(layer).is_ok());
}

TEST(Passes, APrefillOfOneTokenIsSealedAtOnceAndIsNotToChoose) {
  const TestDirectory directory;
  const EngineOptions options = small_options(directory.path());
  EngineRun run(options, 1);
  read_prompt(run);
  const std::vector<float> query = run.draw_query(2, 1);
  std::vector<float> output(query.size());
  for (int64_t token = 0; token < 9; ++token) {
    const Tokens drawn = run.draw_tokens(2, 1);
    ASSERT_TRUE(run.engine().begin_pass(Pass::kPrefill).is_ok());
    EXPECT_TRUE(run.engine().look_ahead(0, run.view(query, 1)).is_ok());
    ASSERT_TRUE(run.engine().append(0, run.view(drawn, 2)).is_ok());
    EXPECT_EQ(run.engine().sequences().layer(0).sealed_groups, options.sealed_groups(101 + token));
    const Status refused =
        run.engine().attend({.layer = 0, .query = run.view(query, 1), .output = output.data()});
    EXPECT_EQ(refused.code(), StatusCode::kInvalid);
    EXPECT_NE(refused.message().find("the pass is a prefill"), std::string::npos);
  }
  EXPECT_TRUE(run.engine().last_selection(0).empty()) << "it never looked ahead";
}

TEST(Passes, OnesThatDecodeAreNotTooLong) {
  const TestDirectory directory;
  EngineRun run(small_options(directory.path()), 1);
  read_prompt(run);
  const auto says = [](const Status& status) {
    EXPECT_EQ(status.code(), StatusCode::kInvalid);
    return status.message().find("at most selection.max_step_tokens (4) tokens, got 5") !=
           std::string::npos;
  };
  ASSERT_TRUE(run.engine().begin_pass(Pass::kDecode).is_ok());
  const Tokens five = run.draw_tokens(2, 5);
  const std::vector<float> query = run.draw_query(2, 5);
  std::vector<float> output(query.size());
  EXPECT_TRUE(says(run.engine().look_ahead(0, run.view(query, 5))));
  EXPECT_TRUE(says(run.engine().append(0, run.view(five, 2))));
  EXPECT_TRUE(says(run.engine().exact_chunks().prepare(0, 2, 5)));
  EXPECT_TRUE(says(
      run.engine().attend({.layer = 0, .query = run.view(query, 5), .output = output.data()})));
  EXPECT_EQ(run.engine().positions(0), 100) << "nothing of it is there";
  run.forward(2, 4);
  run.compare_contents();
}

TEST(Passes, AnEmptyCacheBeginsWithAPrefill) {
  const TestDirectory directory;
  EngineRun run(small_options(directory.path()), 1);
  ChunkedPrefill& chunks = run.engine().exact_chunks();
  EXPECT_TRUE(chunks.takes(0));
  run.forward(2, 1);
  EXPECT_FALSE(chunks.takes(0));
  run.reset();
  EXPECT_TRUE(chunks.takes(0));
}

}  // namespace
}  // namespace kvswap
