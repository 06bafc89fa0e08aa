#include "kvswap/config_json.h"

#include <algorithm>
#include <set>
#include <utility>

#include "engine/settings_check.h"
#include "kvswap/config_blocks.h"
#include "kvswap/errors.h"
#include "kvswap/json.h"
#include "kvswap/json_fields.h"
#include "kvswap/settings_rules.h"

namespace kvswap {

#if KVSWAP_HAS_JSON

namespace {

using Pair = std::pair<int64_t, int64_t>;

/// What tells the versions of a file apart.
struct Version {
  int64_t number;
  const char* table;  // the field with the solutions
};
constexpr Version kFirst = {1, "table"};
constexpr Version kSecond = {kConfigVersion, "solutions"};

/// The fields of a file, or what a solution may set.
std::vector<std::string> names_of(const Version& version, bool only_solvable) {
  std::vector<std::string> names;
  if (version.number == 1) {
    for (const ConfigField& field : kConfigFields) {
      if (field.is_solvable || !only_solvable) names.emplace_back(field.name);
    }
    return names;
  }
  for (const ConfigBlock& block : kConfigBlocks) {
    if (block.is_optional || !only_solvable) names.emplace_back(block.name);
  }
  if (!only_solvable) {
    for (const char* name : {"model", "provenance", "solutions", "version"}) {
      names.emplace_back(name);
    }
    return names;
  }
  names.emplace_back("retention.policy");
  for (const ConfigPath& path : kConfigPaths) {
    if (path.is_solvable) names.push_back(std::string(path.block) + "." + path.field);
  }
  return names;
}

ModelIdentity identity_from(const Json& object) {
  std::vector<std::string> known;
  visit_identity([&](const char* name, auto) { known.emplace_back(name); });
  check_names("model: fields must be among", object, known);
  ModelIdentity identity;
  visit_identity([&](const char* name, auto member) {
    const Json* value = find_field(object, name);
    if (!value) return;
    auto& field = identity.*member;
    bool is_good = take(*value, field);
    if constexpr (std::is_same_v<decltype(field), std::optional<int64_t>&>) {
      is_good = is_good && field.value_or(1) > 0;
    } else {
      is_good = is_good && field.value_or("x") != "";
    }
    if (!is_good) refuse("model." + std::string(name), "a positive int or a name", *value);
  });
  return identity;
}

/// A setting's value in the struct's words, of version 1, where this one was true or false.
Json of_today(const std::string& name, const Json& value) {
  if (name != "look_ahead") return value;
  if (!value.is_boolean()) refuse(name, "true or false", value);
  return value.get<bool>() ? "trust" : "off";
}

/// The settings that a file's fields make, with a row's in the place of its own; flat ones.
Settings settings_of_first(const Json& fields, const Json* row) {
  Settings settings = settings_of_version_1();
  visit_settings([&](const char* name, auto member, const auto& rule) {
    const Json* value = row ? find_field(*row, name) : nullptr;
    if (!value) value = find_field(fields, name);
    if (value && !take(of_today(name, *value), settings.*member)) {
      refuse(name, rule.words(), *value);
    }
  });
  const Status checked = check_settings(settings);
  if (!checked.is_ok()) throw ConfigError(checked.message());
  return settings;
}

Settings settings_from(const Version& version, const Json& fields, const Json* row) {
  if (version.number == 1) return settings_of_first(fields, row);
  return settings_from_blocks(row ? with_changes(fields, *row) : fields);
}

/// What a solution may set: of version 2 settings by their paths.
void check_solution(const Version& version, const Json& settings) {
  const std::vector<std::string> known = names_of(version, true);
  if (version.number == 1) return check_names("table: a solution must set only", settings, known);
  for (const auto& [name, value] : settings.items()) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    throw ConfigError(
        "solutions: a solution must set only settings by their paths (config.schema.json lists "
        "them), got " +
        name);
  }
}

Solution solution_from(const Version& version, const Json& row, const Json& fields,
                       std::set<Pair>& seen) {
  const std::string table = version.table;
  const Json* settings = find_field(row, "settings");
  Solution solution;
  const auto positive = [&](const char* name, int64_t& field) {
    const Json* value = find_field(row, name);
    if (value && take(*value, field) && field > 0) return;
    refuse(table + ": " + name, "a positive int", value ? *value : Json());
  };
  if (!row.is_object() || row.size() != 3 || !settings || !settings->is_object()) {
    refuse(table + ": a row", "an object of batch, context and settings", row);
  }
  positive("batch", solution.batch);
  positive("context", solution.context);
  const std::string pair =
      "batch " + std::to_string(solution.batch) + ", context " + std::to_string(solution.context);
  if (!seen.insert({solution.batch, solution.context}).second) {
    throw ConfigError(table + ": one solution per pair, got two for " + pair);
  }
  check_solution(version, *settings);
  try {
    solution.settings = settings_from(version, fields, settings);
  } catch (const ConfigError& error) {
    throw ConfigError(table + ": " + pair + ": " + error.what());
  }
  return solution;
}

SwapConfig config_from(const Version& version, const Json& fields) {
  static const Json nothing;
  const auto given = [&](const char* name) -> const Json& {
    const Json* value = find_field(fields, name);
    return value ? *value : nothing;
  };
  SwapConfig config;
  const Json& model = given("model");
  if (!model.is_object() && !model.is_null()) refuse("model", "an object or null", model);
  if (model.is_object()) config.model = identity_from(model);
  if (fields.contains("provenance") && !given("provenance").is_object()) {
    refuse("provenance", "an object", given("provenance"));
  }
  const Json& rows = given(version.table);
  if (fields.contains(version.table) && !rows.is_array()) {
    refuse(version.table, "a list of solutions", rows);
  }
  config.settings = settings_from(version, fields, nullptr);
  std::set<Pair> seen;
  for (const Json& row : rows) config.table.push_back(solution_from(version, row, fields, seen));
  return config;
}

}  // namespace

SwapConfig config_from_json(const std::string& text, const std::string& where) {
  Json fields;
  try {
    fields = parse_json(text);
  } catch (const JsonError& error) {
    throw ConfigError(where + ": must be valid JSON: " + error.what() +
                      "; restore the file or tune again");
  }
  const Json* version = find_field(fields, "version");
  if (!fields.is_object()) refuse(where, "a JSON object", fields);
  // Before anything else: a newer file may well have fields that are unknown here.
  const bool is_number = version && version->is_number_integer();
  if (!is_number || (*version != kFirst.number && *version != kSecond.number)) {
    throw ConfigError(where + ": version must be 1 or " + std::to_string(kConfigVersion) +
                      ", which this kvswap_torch reads, got " +
                      (version ? shown(*version) : "none") +
                      "; write it again with the tuner of this kvswap_torch, or use the "
                      "kvswap_torch that wrote it");
  }
  const Version& read = *version == kFirst.number ? kFirst : kSecond;
  check_names(where + ": fields must be among", fields, names_of(read, false));
  try {
    return config_from(read, fields);
  } catch (const ConfigError& error) {
    throw ConfigError(where + ": " + error.what());
  }
}

ModelIdentity identity_from_json(const std::string& text) {
  try {
    const Json object = parse_json(text);
    if (!object.is_object()) throw ConfigError("it is no object");
    return identity_from(object);
  } catch (const JsonError& error) {
    throw ConfigError(error.what());
  }
}

std::string settings_to_json(const Settings& settings) {
  Json blocks = blocks_of(settings);
  blocks["summary"]["projection_file"] = nullptr;
  return blocks.dump();
}

Settings settings_from_json(const std::string& text, int64_t version) {
  try {
    const Json fields = parse_json(text);
    if (!fields.is_object()) throw ConfigError("settings: must be an object");
    const Version& read = version == kFirst.number ? kFirst : kSecond;
    std::vector<std::string> names = names_of(read, false);
    check_names("settings: must be among", fields, names);
    return settings_from(read, fields, nullptr);
  } catch (const JsonError& error) {
    throw ConfigError(error.what());
  }
}

#else

namespace {

[[noreturn]] void refuse() {
  throw ConfigError("this kvswap_torch was built without nlohmann-json and cannot read JSON");
}

}  // namespace

SwapConfig config_from_json(const std::string&, const std::string&) { refuse(); }

ModelIdentity identity_from_json(const std::string&) { refuse(); }

std::string settings_to_json(const Settings&) { refuse(); }

Settings settings_from_json(const std::string&, int64_t) { refuse(); }

#endif

}  // namespace kvswap
