// Calls that a program can get wrong: refused, and the cache goes on.

#include <array>

#include "plain_attention.h"

namespace kvswap {
namespace {

class WrongCalls : public testing::Test {
 protected:
  Folder folder_;
  Cache cache_{covering(folder_.path())};
};

TEST_F(WrongCalls, AMaskMustBeOfABatchOfTokens) {
  const std::array<bool, 4> valid = {true, true, true, true};
  for (const auto& [batch, tokens] : {std::pair<int64_t, int64_t>{1, -100}, {1, -128}, {0, 4}}) {
    EXPECT_THROW(cache_.begin_pass(Pass::kPrefill,
                                   {.batch = batch, .tokens = tokens, .valid = valid.data()}),
                 std::invalid_argument);
  }
  Plain(cache_.options(), 1).step(cache_, 40, 1e-5);
}

TEST_F(WrongCalls, PaddingIsLookedForAtPositions) {
  Plain(cache_.options(), 1).step(cache_, 40, 1e-5);
  EXPECT_THROW((void)cache_.has_padding(-(int64_t{1} << 40), 5), std::invalid_argument);
  EXPECT_THROW((void)cache_.has_padding(6, 5), std::invalid_argument);
  EXPECT_FALSE(cache_.has_padding(5, 50));
}

TEST_F(WrongCalls, AttentionNeedsAPlaceAndAScale) {
  Plain plain(cache_.options(), 1);
  plain.step(cache_, 40, 1e-5);
  const std::vector<float> numbers(4 * 16, 1.0f);
  std::vector<float> output(numbers.size());
  const Queries query = Queries::packed(numbers.data(), 4, 1, 16);
  cache_.begin_pass(Pass::kDecode);
  EXPECT_THROW(cache_.attend(0, query, 0.25f, nullptr), std::invalid_argument);
  for (const float scale : {0.0f, -1.0f, std::nanf(""), INFINITY}) {
    EXPECT_THROW(cache_.attend(0, query, scale, output.data()), std::invalid_argument);
  }
  EXPECT_THROW(cache_.attend(0, query, 0.25f, output.data(), {.softcap = INFINITY}),
               std::invalid_argument);
  plain.step(cache_, 3, 1e-5);
}

}  // namespace
}  // namespace kvswap
