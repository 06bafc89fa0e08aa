#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace kvswap {

/// PRKV (4): on how many of their k best tokens two queries of a head agree, the mean over heads.
/// Of tokens worth the same those of lower positions are the better.
class TopKOverlap {
 public:
  enum class Of : int8_t { kFirst, kLast };  // query

  TopKOverlap(int64_t heads, int64_t k);
  void add(int64_t head, Of query, int32_t position, float importance);
  /// Ends it: nothing may be added afterwards.
  double mean();

  static int64_t bytes(int64_t heads, int64_t k);

 private:
  using Token = std::pair<float, int32_t>;  // worth, position
  std::vector<Token>& best(int64_t head, Of query) {
    return best_[2 * head + (query == Of::kLast ? 1 : 0)];
  }

  int64_t k_;
  std::vector<std::vector<Token>> best_;  // [heads, 2][k], a heap, the worst in front
};

}  // namespace kvswap
