#include "methods/retention/top_tokens.h"

#include <algorithm>
#include <array>
#include <limits>

#include "io/status.h"

namespace kvswap {

void pool_neighbours(std::span<float> mass, int64_t pool) {
  KVSWAP_ASSERT(pool >= 1 && pool <= kKeepPoolMax);
  const auto count = static_cast<int64_t>(mass.size());
  std::array<float, kKeepPoolMax + 1> before{};  // the newest that are sums by now
  const auto place = [&](int64_t i) -> float& { return before[i % before.size()]; };
  for (int64_t i = 0; i < count; ++i) {
    float sum = 0;
    for (int64_t j = std::max<int64_t>(0, i - (pool - 1) / 2); j < i; ++j) sum += place(j);
    for (int64_t j = i; j < std::min(count, i + pool / 2 + 1); ++j) sum += mass[j];
    place(i) = mass[i];
    mass[i] = sum;
  }
}

std::vector<int32_t> by_any_score(RetainArgs args) {
  args.floor = -std::numeric_limits<float>::infinity();
  return by_attention(args);
}

std::vector<int32_t> by_attention(const RetainArgs& args) {
  const auto count = static_cast<int64_t>(args.mass.size());
  const auto is_better = [&](int32_t one, int32_t other) {
    return args.mass[one] != args.mass[other] ? args.mass[one] > args.mass[other] : one < other;
  };
  std::vector<int32_t> retained;  // a heap, the worst in front
  if (args.tokens <= 0) return retained;
  for (int64_t i = args.valid->first_valid(); i < count; ++i) {
    const auto position = static_cast<int32_t>(i);
    const auto group = static_cast<int32_t>(i / args.group_tokens);
    if (!(args.mass[i] > args.floor) || !args.valid->is_valid(i)) continue;
    if (std::find(args.sinks.begin(), args.sinks.end(), group) != args.sinks.end()) continue;
    if (static_cast<int64_t>(retained.size()) == args.tokens) {
      if (!is_better(position, retained.front())) continue;
      std::pop_heap(retained.begin(), retained.end(), is_better);
      retained.pop_back();
    }
    retained.push_back(position);
    std::push_heap(retained.begin(), retained.end(), is_better);
  }
  std::sort_heap(retained.begin(), retained.end(), is_better);
  return retained;
}

}  // namespace kvswap
