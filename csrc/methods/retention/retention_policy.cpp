#include "methods/retention/retention_policy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <numeric>
#include <utility>

#include "io/status.h"

namespace kvswap {
namespace {

constexpr std::array kKinds = {
    RetentionPolicy{.name = "none",
                    .source = "",
                    .keeps_tokens = false,
                    .accumulates = false,
                    .is_given = false,
                    .retains_online = false,
                    .prefers_layers = false,
                    .keeps_outliers = false},
    RetentionPolicy{.name = "newest",
                    .source = "StreamingLLM 3.2",
                    .keeps_tokens = false,
                    .accumulates = false,
                    .is_given = false,
                    .retains_online = false,
                    .prefers_layers = false,
                    .keeps_outliers = false},
    RetentionPolicy{.name = "observed",
                    .source = "SnapKV 4, PRKV 3.4",
                    .keeps_tokens = true,
                    .accumulates = false,
                    .is_given = false,
                    .retains_online = false,
                    .prefers_layers = false,
                    .keeps_outliers = false},
    RetentionPolicy{.name = "heavy",
                    .source = "H2O 4",
                    .keeps_tokens = true,
                    .accumulates = true,
                    .is_given = false,
                    .retains_online = false,
                    .prefers_layers = false,
                    .keeps_outliers = false},
    RetentionPolicy{.name = "arkv",
                    .source = "ARKV IV",
                    .keeps_tokens = true,
                    .accumulates = false,
                    .is_given = false,
                    .retains_online = true,
                    .prefers_layers = false,
                    .keeps_outliers = false},
    RetentionPolicy{.name = "cake",
                    .source = "CAKE 4",
                    .keeps_tokens = true,
                    .accumulates = false,
                    .is_given = false,
                    .retains_online = false,
                    .prefers_layers = true,
                    .keeps_outliers = false},
    RetentionPolicy{.name = "outliers",
                    .source = "ShadowKV 4.1",
                    .keeps_tokens = true,
                    .accumulates = false,
                    .is_given = false,
                    .retains_online = false,
                    .prefers_layers = false,
                    .keeps_outliers = true},
    RetentionPolicy{.name = "given",
                    .source = "",
                    .keeps_tokens = true,
                    .accumulates = true,
                    .is_given = true,
                    .retains_online = false,
                    .prefers_layers = false,
                    .keeps_outliers = false},
};

}  // namespace

std::span<const RetentionPolicy> RetentionPolicy::all() { return kKinds; }

const RetentionPolicy* RetentionPolicy::find(const std::string& name) {
  const auto found = std::find_if(kKinds.begin(), kKinds.end(),
                                  [&](const RetentionPolicy& kind) { return name == kind.name; });
  return found == kKinds.end() ? nullptr : &*found;
}

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

std::vector<int32_t> most_attended(const RetainArgs& args) {
  std::vector<int32_t> retained = by_attention(args);
  std::sort(retained.begin(), retained.end());
  return retained;
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

std::vector<int32_t> retained_after_eviction(const EvictArgs& args) {
  const std::span<const int32_t> positions = args.positions;
  const auto count = static_cast<int64_t>(positions.size());
  std::vector<float> pooled(count, 0.0f);
  for (int64_t i = 0, first = 0; i < count; ++i) {
    while (positions[first] < positions[i] - (args.pool - 1) / 2) ++first;
    for (int64_t j = first; j < count && positions[j] <= positions[i] + args.pool / 2; ++j) {
      pooled[i] += args.importance[j];
    }
  }
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t one, int64_t other) { return pooled[one] > pooled[other]; });
  std::vector<int32_t> stay;
  for (int64_t i = 0; i < std::min(count, args.tokens); ++i) stay.push_back(positions[order[i]]);
  return stay;
}

void AttentionShape::add(double received) {
  tokens_ += 1;
  if (!(received > 0)) return;
  const double square = received * received;
  sum_ += received;
  logs_ += received * std::log(received);
  squares_ += square;
  cubes_ += square * received;
  fourths_ += square * square;
}

double AttentionShape::quality(std::span<const double> temperatures) const {
  KVSWAP_ASSERT(temperatures.size() == 3);
  if (tokens_ < 2 || !(sum_ > 0)) return 0;
  // Of p = received / sum: its mean is 1 / tokens.
  const double entropy = std::log(sum_) - logs_ / sum_;
  const double mean = 1 / tokens_;
  const double square = squares_ / (sum_ * sum_) / tokens_;
  const double cube = cubes_ / (sum_ * sum_ * sum_) / tokens_;
  const double fourth = fourths_ / (sum_ * sum_ * sum_ * sum_) / tokens_;
  const double variance = square - mean * mean;
  const double central =
      fourth - 4 * mean * cube + 6 * mean * mean * square - 3 * mean * mean * mean * mean;
  if (!(entropy > 0) || !(variance > 1e-12 * square) || !(central > 0)) return 0;
  return std::pow(entropy, 1 / temperatures[0]) * std::pow(variance, 1 / temperatures[1]) *
         std::pow(central / (variance * variance), 1 / temperatures[2]);
}

void grow_mass(std::vector<float>& mass, int64_t tokens) {
  if (static_cast<int64_t>(mass.size()) >= tokens) return;
  mass.reserve((tokens + kMassUnit - 1) / kMassUnit * kMassUnit);
  mass.resize(tokens, 0.0f);
}

void RetainedTokens::note_chunk(int64_t begin) {
  const bool is_pending = is_due && due_begin < 0;
  before = {.due_from = is_pending ? std::optional(due_from) : std::nullopt,
            .next = std::move(next),
            .overlap = overlap,
            .begins_anew = begins_anew};
  begins_anew = true;
  next.reset();
  overlap.reset();
  is_due = true;
  due_from = 0;
  due_begin = begin;
}

void RetainedTokens::undo_chunk() {
  window = {};
  is_due = before.due_from.has_value();
  due_from = before.due_from.value_or(0);
  due_begin = -1;
  next = std::move(before.next);
  overlap = before.overlap;
  begins_anew = before.begins_anew;
  before = {};
}

void RetainedTokens::count_queries(int64_t fresh, int64_t interval) {
  queries_since += fresh;
  if (is_due || interval == 0 || queries_since < interval) return;
  is_due = true;
  due_from = seen_positions;
  due_begin = -1;
}

void RetainedTokens::skip_refresh(int64_t interval, bool keeps_window) {
  if (queries_since < interval) return;
  queries_since = 0;
  begins_anew = true;
  if (!keeps_window) window = {};
}

void RetainedTokens::end_refresh(int64_t sealed_positions) {
  next.reset();
  queries_since = 0;
  is_due = false;
  admitted_positions = sealed_positions;
}

void RetainedTokens::set_float8(std::vector<int32_t> positions, std::vector<int8_t> exponents) {
  float8_ = std::move(positions);
  exponents_ = std::move(exponents);
}

void RetainedTokens::set(std::vector<int32_t> positions, int64_t group_tokens) {
  positions_ = std::move(positions);
  std::vector<int32_t> all;
  all.reserve(count());
  std::merge(positions_.begin(), positions_.end(), float8_.begin(), float8_.end(),
             std::back_inserter(all));
  bits_.assign(all.empty() ? 0 : all.back() / 64 + 1, 0);
  for (const int32_t position : all) bits_[position / 64] |= uint64_t{1} << (position % 64);
  whole_groups_.clear();
  for (size_t i = 0; i + group_tokens <= all.size(); ++i) {
    // Rising and distinct: where the first and the last of a group are so far apart, all are there.
    const bool is_first = all[i] % group_tokens == 0;
    if (is_first && all[i + group_tokens - 1] == all[i] + group_tokens - 1) {
      whole_groups_.push_back(static_cast<int32_t>(all[i] / group_tokens));
    }
  }
}

uint64_t RetainedTokens::mask(int64_t first, int64_t count) const {
  return bits_at(bits_, first, count);
}

void RetainedTokens::truncate(const Cut& cut) {
  const auto end = std::lower_bound(positions_.begin(), positions_.end(), cut.sealed);
  const auto float8_end = std::lower_bound(float8_.begin(), float8_.end(), cut.sealed);
  if (end != positions_.end() || float8_end != float8_.end()) {
    float8_.erase(float8_end, float8_.end());
    set(std::vector<int32_t>(positions_.begin(), end), cut.group_tokens);
  }
  if (is_due && cut.positions <= due_begin && count() > 0) undo_chunk();
  if (cut.positions == 0) {
    window = {};
    is_due = false;
  }
  if (next) std::erase_if(*next, [&](int32_t position) { return position >= cut.sealed; });
  excluded.erase(std::lower_bound(excluded.begin(), excluded.end(), cut.sealed), excluded.end());
  std::erase_if(ranked, [&](int32_t position) { return position >= cut.sealed; });
  if (cut.positions == 0) spread.reset();
  admitted_positions = std::min(admitted_positions, cut.sealed);
  if (window.log_sum_exp.empty()) window.truncate(cut.positions);
  if (seen_positions - cut.positions <= cut.step) return;
  seen_positions = cut.positions;
  due_from = std::min(due_from, cut.positions);
  if (static_cast<int64_t>(mass.size()) > cut.positions) mass.resize(cut.positions);
  if (static_cast<int64_t>(decay.size()) > cut.positions) decay.resize(cut.positions);
}

}  // namespace kvswap
