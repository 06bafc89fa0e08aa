#include "engine/check_settings.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <functional>

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

bool is_even(const Rank& rank) {
  if (const auto* one = std::get_if<int64_t>(&rank)) return *one % 2 == 0;
  const auto& each = std::get<std::vector<int64_t>>(rank);
  return std::all_of(each.begin(), each.end(), [](int64_t one) { return one % 2 == 0; });
}

/// As rules and messages name a setting: JSON without quotes.
std::string word_of(const std::string& value) { return value; }
template <typename T>
std::string word_of(const T& value) {
  return json(value);
}

}  // namespace

Status check_settings(const Settings& settings) {
  std::string broken;
  visit_settings([&](const char* name, auto member, const auto& rule) {
    if (!broken.empty() || holds(rule, settings.*member)) return;
    broken = std::string(name) + ": must be " + rule.words() + ", got " + json(settings.*member);
  });
  visit_floors([&](const char* name, auto member, const char* floor, auto floor_member,
                   const char* why, const std::string& keeper) {
    const bool is_meant = keeper.empty() || settings.keeper == keeper;
    if (!broken.empty() || !is_meant || settings.*member >= settings.*floor_member) return;
    broken = std::string(name) + ": must be at least " + floor + " (" +
             json(settings.*floor_member) + "), " + why + ", got " + json(settings.*member);
  });
  const Settings defaults;
  visit_owned([&](const char* name, auto member, const char* owner, auto owner_member,
                  const std::string& word, const OneOf& values) {
    const bool is_default = settings.*member == defaults.*member;
    if (!broken.empty() || is_default || !concerns(values, settings.*member) ||
        word_of(settings.*owner_member) == word)
      return;
    broken = std::string(name) + ": must be left out where " + owner + " is " +
             word_of(settings.*owner_member) + ", since it belongs to " + word + ", got " +
             json(settings.*member);
  });
  visit_idle([&](const char* name, auto member, const char* owner, auto owner_member,
                 const std::string& word, const char* why, const OneOf& values) {
    if (!broken.empty() || settings.*member == defaults.*member ||
        !concerns(values, settings.*member) || word_of(settings.*owner_member) != word)
      return;
    broken = std::string(name) + ": must be left out where " + owner + " is " + word + ", " + why +
             ", got " + json(settings.*member);
  });
  visit_even([&](const char* name, auto member, const char* owner, auto owner_member,
                 const std::string& word, const char* why) {
    if (!broken.empty() || word_of(settings.*owner_member) != word || is_even(settings.*member))
      return;
    broken = std::string(name) + ": must be even where " + owner + " is " + word + ", " + why +
             ", got " + json(settings.*member);
  });
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
