#include "kvswap/config_parts.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>

#include "kvswap/errors.h"
#include "kvswap/settings_rules.h"

namespace kvswap {
namespace {

using Kind = JsonValue::Kind;

[[noreturn]] void refuse(const std::string& name, const std::string& must, const JsonValue& got) {
  throw ConfigError(name + ": must be " + must + ", got " + python_repr(got));
}

bool is_int(const JsonValue& value, int64_t low, int64_t high) {
  return value.is(Kind::kInteger) && value.integer >= low && value.integer <= high;
}

void check_number(const std::string& name, const IntRange& rule, const JsonValue& value) {
  if (is_int(value, rule.low, rule.high)) return;
  refuse(name, "an int from " + std::to_string(rule.low) + " to " + std::to_string(rule.high),
         value);
}

void assign(int64_t& field, const std::string& name, const IntRange& rule, const JsonValue& value) {
  check_number(name, rule, value);
  field = value.integer;
}

void assign(std::optional<int64_t>& field, const std::string& name, const IntRange& rule,
            const JsonValue& value) {
  field.reset();
  if (value.is(Kind::kNull)) return;
  check_number(name, rule, value);
  field = value.integer;
}

void assign(bool& field, const std::string& name, const Boolean&, const JsonValue& value) {
  if (!value.is(Kind::kBool)) refuse(name, "true or false", value);
  field = value.boolean;
}

void check_word(const std::string& name, const OneOf& rule, const JsonValue& value) {
  std::string words;
  for (const char* word : rule.words) {
    const bool is_null = std::strcmp(word, "None") == 0;
    if (is_null ? value.is(Kind::kNull) : value.is(Kind::kString) && value.text == word) return;
    words += (words.empty() ? "" : ", ") + std::string(word);
  }
  refuse(name, "one of " + words, value);
}

void assign(std::string& field, const std::string& name, const OneOf& rule,
            const JsonValue& value) {
  check_word(name, rule, value);
  field = value.text;
}

void assign(std::optional<std::string>& field, const std::string& name, const OneOf& rule,
            const JsonValue& value) {
  check_word(name, rule, value);
  field = value.is(Kind::kNull) ? std::nullopt : std::optional(value.text);
}

void assign(Rank& field, const std::string& name, const RankRange& rule, const JsonValue& value) {
  std::vector<int64_t> ranks;
  for (const JsonValue& item : value.items) {
    if (is_int(item, 1, rule.high)) ranks.push_back(item.integer);
  }
  const bool is_list = !ranks.empty() && ranks.size() == value.items.size();
  if (!is_list && !is_int(value, 1, rule.high)) {
    refuse(name,
           "an int from 1 to " + std::to_string(rule.high) + ", or one for each layer on disk",
           value);
  }
  field = is_list ? Rank(std::move(ranks)) : Rank(value.integer);
}

void assign(std::vector<int64_t>& field, const std::string& name, const LayerNumbers&,
            const JsonValue& value) {
  field.clear();
  for (const JsonValue& item : value.items) {
    const bool rises = field.empty() || item.integer > field.back();
    if (!is_int(item, 0, std::numeric_limits<int64_t>::max()) || !rises) break;
    field.push_back(item.integer);
  }
  if (!value.is(Kind::kArray) || field.size() != value.items.size()) {
    refuse(name, "numbers of layers, rising", value);
  }
}

bool leaves_folder(const std::string& name) {
  if (name[0] == '/') return true;
  std::istringstream parts(name);
  for (std::string part; std::getline(parts, part, '/');) {
    if (part == "..") return true;
  }
  return false;
}

void assign(std::optional<std::string>& field, const std::string& name, const FileName&,
            const JsonValue& value) {
  field.reset();
  if (value.is(Kind::kNull)) return;
  if (!value.is(Kind::kString) || value.text.empty()) refuse(name, "a file name", value);
  field = value.text;
}

void assign_identity(std::optional<int64_t>& field, const char* name, const JsonValue& value) {
  if (value.is(Kind::kNull)) return;
  if (!is_int(value, std::numeric_limits<int64_t>::min(), -1) &&
      !is_int(value, 1, std::numeric_limits<int64_t>::max())) {
    throw ConfigError("model." + std::string(name) + ": must be a int, got " + python_repr(value));
  }
  if (value.integer < 0) {
    throw ConfigError("model." + std::string(name) + ": must be positive, got " +
                      python_repr(value));
  }
  field = value.integer;
}

void assign_identity(std::optional<std::string>& field, const char* name, const JsonValue& value) {
  if (value.is(Kind::kNull)) return;
  if (!value.is(Kind::kString) || value.text.empty()) {
    throw ConfigError("model." + std::string(name) + ": must be a str, got " + python_repr(value));
  }
  field = value.text;
}

}  // namespace

std::string read_file(const std::string& path, const std::string& where, const std::string& kind) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  // An empty file sets failbit on the way out and is no error of reading.
  if (!file.is_open() || (!text && errno != 0)) {
    const int number = errno != 0 ? errno : EIO;
    throw ConfigError(where + ": must be a readable " + kind + ": [Errno " +
                      std::to_string(number) + "] " + std::strerror(number) + ": " +
                      python_repr(path));
  }
  return text.str();
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

void set_field(Settings& settings, const std::string& name, const JsonValue& value) {
  visit_settings([&](const char* field, auto member, const auto& rule) {
    if (name == field) assign(settings.*member, name, rule, value);
  });
}

void check_together(const Settings& settings) {
  const auto refuse_small = [](const std::string& message, int64_t got) {
    throw ConfigError(message + ", got " + std::to_string(got));
  };
  if (settings.pages_max < settings.groups_max) {
    refuse_small("pages_max: must be at least groups_max (" + std::to_string(settings.groups_max) +
                     "), since what a step attends must be in memory",
                 settings.pages_max);
  }
  if (settings.pages_max < settings.select_queries_max) {
    refuse_small("pages_max: must be at least select_queries_max (" +
                     std::to_string(settings.select_queries_max) +
                     "), a page for each query's choice",
                 settings.pages_max);
  }
  if (settings.merge_gap_bytes > settings.merge_bytes_max) {
    refuse_small("merge_gap_bytes: must be at most merge_bytes_max (" +
                     std::to_string(settings.merge_bytes_max) + ")",
                 settings.merge_gap_bytes);
  }
  if (settings.projection_file && leaves_folder(*settings.projection_file)) {
    throw ConfigError(
        "projection_file: must lie beside the config or in a folder below it, so that the two "
        "travel together, got " +
        python_repr(*settings.projection_file));
  }
}

void check_ranks(const Rank& rank, int64_t width) {
  const auto* each = std::get_if<std::vector<int64_t>>(&rank);
  const std::vector<int64_t> ranks = each ? *each : std::vector{std::get<int64_t>(rank)};
  const auto fits = [&](int64_t one) { return one >= 1 && one <= width; };
  if (!ranks.empty() && std::all_of(ranks.begin(), ranks.end(), fits)) return;
  throw ConfigError("rank: must be an int from 1 to " + std::to_string(width) +
                    ", or one for each layer on disk, got " +
                    (each ? python_repr(ranks) : std::to_string(ranks[0])));
}

ModelIdentity identity_from(const JsonValue& object) {
  std::vector<std::string> known;
  visit_identity([&](const char* name, auto) { known.push_back(name); });
  std::vector<std::string> unknown;
  for (const JsonField& field : object.fields) {
    if (std::find(known.begin(), known.end(), field.name) == known.end()) {
      unknown.push_back(field.name);
    }
  }
  if (!unknown.empty()) {
    std::sort(unknown.begin(), unknown.end());
    throw ConfigError("model: fields must be among " + joined(known) + ", got " + joined(unknown));
  }
  ModelIdentity identity;
  visit_identity([&](const char* name, auto member) {
    if (const JsonValue* value = object.find(name)) assign_identity(identity.*member, name, *value);
  });
  return identity;
}

}  // namespace kvswap
