#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <variant>
#include <vector>

namespace kvswap {

// What a setting may be; settings_rules.h says which setting follows which. `holds` asks whether a
// value obeys, `words` says what it must be.

/// From low to high.
struct IntRange {
  int64_t low;
  int64_t high;
  bool holds(int64_t value) const { return value >= low && value <= high; }
  std::string words() const {
    return "an int from " + std::to_string(low) + " to " + std::to_string(high);
  }
};

/// From low to high; `range` says it.
struct RealRange {
  double low;
  double high;
  const char* range;
  bool holds(double value) const { return value >= low && value <= high; }
  std::string words() const { return std::string("a float from ") + range; }
};

/// So many from low to high; `range` says it.
struct RealsRange {
  size_t count;
  double low;
  double high;
  const char* range;
  bool holds(const std::vector<double>& values) const {
    const auto fits = [&](double one) { return one >= low && one <= high; };
    return values.size() == count && std::all_of(values.begin(), values.end(), fits);
  }
  std::string words() const { return std::to_string(count) + " floats from " + range; }
};

/// Any number of them from low to high; `range` says it.
struct Reals {
  double low;
  double high;
  const char* range;
  bool holds(const std::vector<double>& values) const {
    return std::all_of(values.begin(), values.end(),
                       [&](double one) { return one >= low && one <= high; });
  }
  std::string words() const { return std::string("floats from ") + range; }
};

/// Between 0 and 1, neither of them.
struct Share {
  bool holds(double value) const { return value > 0 && value < 1; }
  std::string words() const { return "a number between 0 and 1"; }
};

struct Boolean {
  bool holds(bool) const { return true; }
  std::string words() const { return "true or false"; }
};

/// One of a few words.
struct OneOf {
  std::vector<const char*> choices;
  bool holds(const std::string& value) const {
    return std::find(choices.begin(), choices.end(), value) != choices.end();
  }
  std::string words() const {
    std::string all;
    for (const char* choice : choices)
      all += (all.empty() ? "one of " : ", ") + std::string(choice);
    return all;
  }
};

/// From 1 to high, one number or a list of them.
struct RankRange {
  int64_t high;
  bool holds(const std::variant<int64_t, std::vector<int64_t>>& rank) const {
    const auto fits = [&](int64_t one) { return one >= 1 && one <= high; };
    if (const auto* one = std::get_if<int64_t>(&rank)) return fits(*one);
    const auto& each = std::get<std::vector<int64_t>>(rank);
    return !each.empty() && std::all_of(each.begin(), each.end(), fits);
  }
  std::string words() const {
    return "an int from 1 to " + std::to_string(high) + ", or one for each layer on disk";
  }
};

/// Numbers of `what`, rising.
struct Numbers {
  const char* what;
  bool holds(const std::vector<int64_t>& numbers) const {
    const bool rises =
        std::adjacent_find(numbers.begin(), numbers.end(), std::greater_equal<>()) == numbers.end();
    return rises && (numbers.empty() || numbers[0] >= 0);
  }
  std::string words() const { return std::string(what) + ", rising"; }
};

/// A file beside the config or in a folder below it.
struct FileName {
  bool holds(const std::string& name) const {
    if (name.empty() || name[0] == '/') return false;
    std::istringstream parts(name);
    for (std::string part; std::getline(parts, part, '/');) {
      if (part == "..") return false;
    }
    return true;
  }
  std::string words() const { return "a file beside the config or in a folder below it"; }
};

/// Nothing too may stand where the setting is optional.
template <typename Rule, typename T>
bool holds(const Rule& rule, const std::optional<T>& value) {
  return !value || rule.holds(*value);
}
template <typename Rule, typename T>
bool holds(const Rule& rule, const T& value) {
  return rule.holds(value);
}

}  // namespace kvswap
