#include "engine/settings_check.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <functional>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>
#include <type_traits>

#include "kvswap/settings_rules.h"

namespace kvswap {
namespace {

std::string json(int64_t value) { return std::to_string(value); }
std::string json(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}
std::string json(bool value) { return value ? "true" : "false"; }

std::string json(const std::string& value) {
  std::string text = "\"";
  for (const char letter : value) {
    if (static_cast<unsigned char>(letter) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", letter);
      text += escape;
    } else {
      if (letter == '"' || letter == '\\') text += '\\';
      text += letter;
    }
  }
  return text + '"';
}

template <typename T>
std::string json(const std::vector<T>& values) {
  std::string text;
  for (const T value : values) text += (text.empty() ? "" : ", ") + json(value);
  return "[" + text + "]";
}

std::string json(const Rank& rank) {
  return std::visit([](const auto& value) { return json(value); }, rank);
}

template <typename T>
std::string json(const std::optional<T>& value) {
  return value ? json(*value) : "null";
}

/// A setting as rules between two of them see it.
struct Fact {
  std::string text;  // JSON
  bool is_default = true;
  std::optional<int64_t> number;

  /// JSON without quotes.
  std::string word() const {
    return text.starts_with('"') ? text.substr(1, text.size() - 2) : text;
  }
};

using Facts = std::map<std::string, Fact, std::less<>>;

Facts facts_of(const Settings& settings) {
  const Settings defaults;
  Facts facts;
  visit_settings([&](const char* name, auto member, const auto&) {
    Fact& fact = facts[name];
    fact.text = json(settings.*member);
    fact.is_default = settings.*member == defaults.*member;
    if constexpr (std::is_same_v<std::decay_t<decltype(settings.*member)>, int64_t>) {
      fact.number = settings.*member;
    }
  });
  return facts;
}

bool has_word(std::string_view words, const std::string& word) {
  while (!words.empty()) {
    const size_t end = std::min(words.find(' '), words.size());
    if (words.substr(0, end) == word) return true;
    words.remove_prefix(std::min(end + 1, words.size()));
  }
  return false;
}

bool is_even(const Rank& rank) {
  if (const auto* one = std::get_if<int64_t>(&rank)) return *one % 2 == 0;
  const auto& each = std::get<std::vector<int64_t>>(rank);
  return std::all_of(each.begin(), each.end(), [](int64_t one) { return one % 2 == 0; });
}

/// Rules between settings, in messages with a caller's names.
class Between {
 public:
  Between(const Settings& settings, const SettingNames& names)
      : settings_(settings), facts_(facts_of(settings)), names_(names) {}

  /// What the first broken one says; empty: none is.
  std::string broken() const {
    for (const FloorRule& rule : kFloorRules) {
      if (is_below(rule)) {
        return name(rule.name) + ": must be at least " + name(rule.floor) + " (" +
               facts_.at(rule.floor).text + "), " + rule.why + ", got " + facts_.at(rule.name).text;
      }
    }
    for (const OnlyRule& rule : kOnlyRules) {
      if (is_misplaced(rule)) return misplaced(rule);
    }
    for (const EvenRule& rule : kEvenRules) {
      if (facts_.at(rule.owner).word() != rule.word || is_even(settings_.rank)) continue;
      return name(rule.name) + ": must be even where " + name(rule.owner) + " is " + rule.word +
             ", " + rule.why + ", got " + facts_.at(rule.name).text;
    }
    return "";
  }

 private:
  bool is_below(const FloorRule& rule) const {
    const std::string keeper = rule.keeper;
    return (keeper.empty() || settings_.keeper == keeper) &&
           *facts_.at(rule.name).number < *facts_.at(rule.floor).number;
  }
  bool is_misplaced(const OnlyRule& rule) const {
    const Fact& fact = facts_.at(rule.name);
    const std::string_view values = rule.values, but = rule.but;
    if (values.empty() ? fact.is_default : !has_word(values, fact.word())) return false;
    const std::string owner = facts_.at(rule.owner).word();
    return but.empty() ? !has_word(rule.words, owner) : has_word(but, owner);
  }
  std::string misplaced(const OnlyRule& rule) const {
    std::string why = rule.why;
    if (why.empty()) {
      std::istringstream words(rule.words);
      for (std::string each; words >> each;) {
        why += (why.empty() ? "since it belongs to " : ", ") + word(rule.owner, each);
      }
    }
    return name(rule.name) + ": must be left out where " + name(rule.owner) + " is " +
           word(rule.owner, facts_.at(rule.owner).word()) + ", " + why + ", got " + got(rule.name);
  }
  std::string name(const std::string& name) const { return names_.name ? names_.name(name) : name; }
  std::string word(const std::string& name, const std::string& word) const {
    return names_.word ? names_.word(name, word) : word;
  }
  std::string got(const std::string& name) const {
    const Fact& fact = facts_.at(name);
    return fact.text.starts_with('"') ? json(word(name, fact.word())) : fact.text;
  }

  const Settings& settings_;
  Facts facts_;
  const SettingNames& names_;
};

}  // namespace

Status check_settings(const Settings& settings, const SettingNames& names) {
  std::string broken;
  visit_settings([&](const char* name, auto member, const auto& rule) {
    if (!broken.empty() || holds(rule, settings.*member)) return;
    broken = (names.name ? names.name(name) : name) + ": must be " + rule.words() + ", got " +
             json(settings.*member);
  });
  if (broken.empty()) broken = Between(settings, names).broken();
  return broken.empty() ? Status::ok() : Status::invalid(broken);
}

bool is_exact(const Settings& settings, int64_t layer) {
  const std::vector<int64_t>& layers = settings.exact_layers;
  return (settings.rows == "none" && settings.keeper == "none") ||
         std::find(layers.begin(), layers.end(), layer) != layers.end();
}

std::string settings_json(const Settings& settings) {
  std::string text;
  visit_settings([&](const char* name, auto member, const auto&) {
    text += (text.empty() ? "" : ", ") + json(std::string(name)) + ": " + json(settings.*member);
  });
  return "{" + text + "}";
}

}  // namespace kvswap
