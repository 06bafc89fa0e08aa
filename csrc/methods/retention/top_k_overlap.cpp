#include "methods/retention/top_k_overlap.h"

#include <algorithm>

namespace kvswap {
namespace {

constexpr auto kIsBetter = [](const auto& one, const auto& other) {
  return one.first != other.first ? one.first > other.first : one.second < other.second;
};

}  // namespace

TopKOverlap::TopKOverlap(int64_t heads, int64_t k) : k_(k), best_(2 * heads) {}

void TopKOverlap::add(int64_t head, Of query, int32_t position, float importance) {
  std::vector<Token>& best = this->best(head, query);
  const Token token = {importance, position};
  if (static_cast<int64_t>(best.size()) == k_) {
    if (!kIsBetter(token, best.front())) return;
    std::pop_heap(best.begin(), best.end(), kIsBetter);
    best.pop_back();
  }
  best.push_back(token);
  std::push_heap(best.begin(), best.end(), kIsBetter);
}

double TopKOverlap::mean() {
  const auto by_position = [](const Token& one, const Token& other) {
    return one.second < other.second;
  };
  int64_t agreed = 0;
  for (size_t head = 0; 2 * head < best_.size(); ++head) {
    std::vector<Token>& first = best_[2 * head];
    std::vector<Token>& last = best_[2 * head + 1];
    std::sort(first.begin(), first.end(), by_position);
    std::sort(last.begin(), last.end(), by_position);
    for (size_t i = 0, j = 0; i < first.size() && j < last.size();) {
      if (first[i].second == last[j].second) ++agreed;
      first[i].second < last[j].second ? ++i : ++j;
    }
  }
  return 2.0 * static_cast<double>(agreed) / static_cast<double>(best_.size());
}

int64_t TopKOverlap::bytes(int64_t heads, int64_t k) {
  return 2 * heads * (2 * k * int64_t{sizeof(Token)} + int64_t{sizeof(std::vector<Token>)});
}

}  // namespace kvswap
