#include "methods/retention/retained_state.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "kernels/float8_exponent.h"

namespace kvswap {
namespace {

constexpr uint32_t kLayout = 1;  // of the fields below

class Writer {
 public:
  template <typename T>
  void operator()(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* first = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), first, first + sizeof(T));
  }
  void operator()(const bool& flag) { (*this)(static_cast<uint8_t>(flag)); }
  template <typename T>
  void operator()(const std::vector<T>& values) {
    (*this)(static_cast<uint64_t>(values.size()));
    const auto* first = reinterpret_cast<const std::byte*>(values.data());
    bytes_.insert(bytes_.end(), first, first + values.size() * sizeof(T));
  }
  template <typename T>
  void operator()(const std::optional<T>& value) {
    (*this)(value.has_value());
    if (value) (*this)(*value);
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

/// What does not fit is left as it was, and is_whole() says so.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  void operator()(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (has(sizeof(T))) std::memcpy(&value, taken(sizeof(T)), sizeof(T));
  }
  void operator()(bool& flag) {
    uint8_t byte = 0;
    (*this)(byte);
    is_whole_ = is_whole_ && byte <= 1;
    flag = byte == 1;
  }
  template <typename T>
  void operator()(std::vector<T>& values) {
    uint64_t count = 0;
    (*this)(count);
    if (count > bytes_.size() / sizeof(T)) is_whole_ = false;
    if (!is_whole_) return;
    values.resize(count);
    if (count > 0) std::memcpy(values.data(), taken(count * sizeof(T)), count * sizeof(T));
  }
  template <typename T>
  void operator()(std::optional<T>& value) {
    bool is_there = false;
    (*this)(is_there);
    value.reset();
    if (is_there) (*this)(value.emplace());
  }
  /// Everything was there, and nothing else is.
  bool is_whole() const { return is_whole_ && bytes_.empty(); }

 private:
  bool has(size_t count) {
    is_whole_ = is_whole_ && count <= bytes_.size();
    return is_whole_;
  }
  const std::byte* taken(size_t count) {
    const std::byte* first = bytes_.data();
    bytes_ = bytes_.subspan(count);
    return first;
  }

  std::span<const std::byte> bytes_;
  bool is_whole_ = true;
};

struct Sets {
  std::vector<int32_t> positions;
  std::vector<int32_t> float8;
  std::vector<int8_t> exponents;
};

/// Each field once, for both ways.
template <typename Field, typename Retained, typename Of>
void each_field(Field& field, Retained& retained, Of& sets) {
  field(sets.positions), field(sets.float8), field(sets.exponents), field(retained.excluded);
  field(retained.mass), field(retained.decay), field(retained.begins_anew);
  field(retained.queries_since), field(retained.is_staggered), field(retained.seen_positions);
  field(retained.is_due), field(retained.due_from), field(retained.due_begin), field(retained.next);
  field(retained.before.due_from), field(retained.before.next), field(retained.before.overlap);
  field(retained.before.begins_anew), field(retained.admitted_positions);
  field(retained.quality), field(retained.overlap), field(retained.spread);
  field(retained.ranked), field(retained.candidates);
  auto& window = retained.window;
  field(window.queries), field(window.log_sum_exp), field(window.count);
  field(window.first_position), field(window.scale), field(window.softcap);
  field(window.slots), field(window.begin), field(window.sinks);
}

/// Positions of sealed tokens, each once.
bool are_tokens(std::vector<int32_t> tokens, bool must_rise, const RetainedLimits& limits,
                int64_t most) {
  if (std::ssize(tokens) > most) return false;
  if (!must_rise) std::sort(tokens.begin(), tokens.end());
  const bool are_there = tokens.empty() || (tokens.front() >= 0 && tokens.back() < limits.sealed);
  return are_there &&
         std::adjacent_find(tokens.begin(), tokens.end(), std::greater_equal<>()) == tokens.end();
}

bool are_numbers(const std::vector<float>& values) {
  return std::none_of(values.begin(), values.end(), [](float one) { return std::isnan(one); });
}

bool is_finite(const std::optional<double>& value) { return !value || std::isfinite(*value); }

bool is_window(const ObservationWindow& window, const RetainedLimits& limits) {
  const auto of_heads = static_cast<size_t>(limits.heads);
  const size_t row_bytes = of_heads * limits.head_dim * dtype_bytes(limits.dtype);
  const auto rows = static_cast<int64_t>(window.queries.size() / row_bytes);
  // Those of a chunk that was cut are as they were, until another's replace them.
  const int64_t positions = window.log_sum_exp.empty() ? limits.positions + limits.step
                                                       : std::numeric_limits<int32_t>::max();
  const bool is_ring = window.slots == rows && (rows == 0 || window.begin < rows);
  return window.queries.size() % row_bytes == 0 && rows <= limits.window && window.count >= 0 &&
         window.count <= rows && window.begin >= 0 &&
         (is_ring || (window.slots == 0 && window.begin == 0)) && window.first_position >= 0 &&
         window.first_position + window.count <= positions && std::isfinite(window.scale) &&
         std::isfinite(window.softcap) &&
         (window.log_sum_exp.empty() || window.log_sum_exp.size() == of_heads * window.count) &&
         (window.sinks.empty() || window.sinks.size() == of_heads) &&
         are_numbers(window.log_sum_exp) && are_numbers(window.sinks);
}

bool are_counts(const RetainedTokens& retained, const RetainedLimits& limits) {
  const int64_t most = limits.positions + limits.step;
  const auto is_between = [](int64_t value, int64_t low, int64_t high) {
    return value >= low && value <= high;
  };
  return is_between(retained.queries_since, 0, int64_t{1} << 40) &&
         is_between(retained.seen_positions, 0, most) && is_between(retained.due_from, 0, most) &&
         is_between(retained.due_begin, -1, most) &&
         is_between(retained.before.due_from.value_or(0), 0, most) &&
         is_between(retained.admitted_positions, 0, limits.sealed) &&
         is_between(retained.candidates, 0, limits.sealed);
}

bool fit_pages(const Sets& sets, const RetainedLimits& limits) {
  const auto pages = [&](const std::vector<int32_t>& tokens) {
    return (std::ssize(tokens) + limits.group_tokens - 1) / limits.group_tokens;
  };
  if (sets.float8.empty()) return sets.exponents.empty() && pages(sets.positions) <= limits.pages;
  if (limits.note_bytes == 0) return false;
  const int64_t each = limits.float8_per_page;
  return pages(sets.positions) + (pages(sets.float8) + each - 1) / each <= limits.pages &&
         std::ssize(sets.exponents) == pages(sets.float8) * limits.note_bytes &&
         std::all_of(sets.exponents.begin(), sets.exponents.end(),
                     [&](int8_t one) { return is_float8(one, limits.dtype); });
}

bool are_apart(const Sets& sets) {
  return std::none_of(sets.float8.begin(), sets.float8.end(), [&](int32_t token) {
    return std::binary_search(sets.positions.begin(), sets.positions.end(), token);
  });
}

std::optional<std::string> what_is_wrong(const RetainedTokens& retained, const Sets& sets,
                                         const RetainedLimits& limits) {
  const bool are_retained = are_tokens(sets.positions, true, limits, limits.in_dtype_max) &&
                            are_tokens(sets.float8, true, limits, limits.tokens_max) &&
                            are_apart(sets);
  if (!are_retained) return "hold positions of sealed tokens that rise, of so many as may be kept";
  if (!fit_pages(sets, limits)) return "fit the pages of kept tokens";
  for (const auto* next : {&retained.next, &retained.before.next}) {
    if (*next && !are_tokens(**next, false, limits, std::max(limits.sealed, int64_t{0}))) {
      return "choose sealed tokens, each once";
    }
  }
  if (!are_tokens(retained.excluded, true, limits, limits.tokens_max)) {
    return "leave sealed tokens out, which rise";
  }
  if (!are_tokens(retained.ranked, false, limits, limits.tokens_max)) return "rank sealed tokens";
  const int64_t numbers = limits.positions + limits.step + kMassUnit;
  if (std::ssize(retained.mass) > numbers || std::ssize(retained.decay) > numbers ||
      !are_numbers(retained.mass) || !are_numbers(retained.decay)) {
    return "hold a number for each token";
  }
  if (!are_counts(retained, limits)) return "count what the session has";
  if (!is_window(retained.window, limits)) return "hold queries of its newest tokens";
  const bool is_spread = !retained.spread || (std::isfinite(retained.spread->dispersion) &&
                                              std::isfinite(retained.spread->change));
  if (!is_finite(retained.quality) || !is_finite(retained.overlap) ||
      !is_finite(retained.before.overlap) || !is_spread) {
    return "hold finite measures";
  }
  return std::nullopt;
}

}  // namespace

RetainedPageCounts page_counts(const RetainedTokens& retained, int64_t group_tokens) {
  const auto pages = [&](const std::vector<int32_t>& tokens) {
    return (std::ssize(tokens) + group_tokens - 1) / group_tokens;
  };
  return {pages(retained.positions()), pages(retained.float8())};
}

std::vector<std::byte> retained_to_bytes(const RetainedTokens& retained) {
  Writer writer;
  writer(kLayout);
  const Sets sets = {retained.positions(), retained.float8(), retained.exponents()};
  each_field(writer, retained, sets);
  return writer.take();
}

std::optional<std::string> retained_from_bytes(std::span<const std::byte> bytes,
                                               const RetainedLimits& limits,
                                               RetainedTokens& retained) {
  Reader reader(bytes);
  uint32_t layout = 0;
  reader(layout);
  RetainedTokens found;
  Sets sets;
  each_field(reader, found, sets);
  if (layout != kLayout || !reader.is_whole()) return "be as long as what it holds";
  if (auto wrong = what_is_wrong(found, sets, limits)) return wrong;
  found.set_float8(std::move(sets.float8), std::move(sets.exponents));
  found.set(std::move(sets.positions), limits.group_tokens);
  retained = std::move(found);
  return std::nullopt;
}

}  // namespace kvswap
