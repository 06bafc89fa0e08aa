#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "methods/selection/selector.h"

namespace kvswap {

/// Of layer 0 of a batch of one.
struct OneChoice {
  const std::vector<float>& query;  // [heads, head_dim]
  int64_t heads = 0;
  const PaddingMask& valid;
  int64_t groups = 0;
  int64_t k = 0;
  float scale = 1.0f;
};

/// The k groups that a selector chooses for one query.
inline std::vector<int32_t> choose(Selector& selector, const OneChoice& of) {
  const int64_t width = static_cast<int64_t>(of.query.size());
  const Candidates candidates = {&of.valid, {}};
  std::vector<std::vector<int32_t>> chosen;
  EXPECT_TRUE(selector
                  .start_choice({.layer = 0,
                                 .query = {.data = of.query.data(),
                                           .batch_stride = width,
                                           .head_stride = width / of.heads,
                                           .query_stride = width / of.heads,
                                           .heads = of.heads,
                                           .queries = 1},
                                 .groups = of.groups,
                                 .groups_per_query = of.k,
                                 .candidates = {&candidates, 1},
                                 .chosen = &chosen,
                                 .scale = of.scale})
                  .is_ok());
  EXPECT_TRUE(selector.finish_choice().is_ok());
  return chosen.at(0);
}

}  // namespace kvswap
