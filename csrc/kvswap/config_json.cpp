#include "kvswap/config_json.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "engine/check_settings.h"
#include "kvswap/errors.h"
#include "kvswap/json.h"
#include "kvswap/settings_rules.h"

namespace kvswap {

#if KVSWAP_HAS_JSON

namespace {

using Pair = std::pair<int64_t, int64_t>;

[[noreturn]] void refuse(const std::string& name, const std::string& must, const Json& got) {
  throw ConfigError(name + ": must be " + must + ", got " + shown(got));
}

// take(): a value of the field's own type; false where it is of another.

bool take(const Json& value, int64_t& field) {
  const auto most = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned() && value.get<uint64_t>() > most) return false;
  field = value.get<int64_t>();
  return true;
}

bool take(const Json& value, double& field) {
  if (value.is_number_float()) field = value.get<double>();
  return value.is_number_float();
}

bool take(const Json& value, bool& field) {
  if (value.is_boolean()) field = value.get<bool>();
  return value.is_boolean();
}

bool take(const Json& value, std::string& field) {
  if (value.is_string()) field = value.get<std::string>();
  return value.is_string();
}

template <typename T>
bool take(const Json& value, std::vector<T>& field) {
  field.resize(value.is_array() ? value.size() : 0);
  for (size_t i = 0; i < field.size(); ++i) {
    if (!take(value[i], field[i])) return false;
  }
  return value.is_array();
}

bool take(const Json& value, Rank& field) {
  if (value.is_array()) return take(value, field.emplace<std::vector<int64_t>>());
  return take(value, field.emplace<int64_t>());
}

template <typename T>
bool take(const Json& value, std::optional<T>& field) {
  field.reset();
  return value.is_null() || take(value, field.emplace());
}

std::vector<const char*> names_of(bool only_solvable) {
  std::vector<const char*> names;
  for (const ConfigField& field : kConfigFields) {
    if (field.is_solvable || !only_solvable) names.push_back(field.name);
  }
  return names;
}

/// Throws unless every field of `object` is among `known`; `must` says what then.
void check_names(const std::string& must, const Json& object,
                 const std::vector<const char*>& known) {
  std::string all;
  std::set<std::string> names;
  for (const char* name : known) {
    names.insert(name);
    all += (all.empty() ? "" : ", ") + std::string(name);
  }
  for (const auto& [name, value] : object.items()) {
    if (!names.contains(name)) throw ConfigError(must + " " + all + ", got " + name);
  }
}

ModelIdentity identity_from(const Json& object) {
  std::vector<const char*> known;
  visit_identity([&](const char* name, auto) { known.push_back(name); });
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

/// The settings that a file's fields make, with a row's in the place of its own.
Settings settings_from(const Json& fields, const Json* row) {
  Settings settings;
  visit_settings([&](const char* name, auto member, const auto& rule) {
    const Json* value = row ? find_field(*row, name) : nullptr;
    if (!value) value = find_field(fields, name);
    if (value && !take(*value, settings.*member)) refuse(name, rule.words(), *value);
  });
  const Status checked = check_settings(settings);
  if (!checked.is_ok()) throw ConfigError(checked.message());
  return settings;
}

Solution solution_from(const Json& row, const Json& fields, std::set<Pair>& seen) {
  const Json* settings = find_field(row, "settings");
  Solution solution;
  const auto positive = [&](const char* name, int64_t& field) {
    const Json* value = find_field(row, name);
    if (value && take(*value, field) && field > 0) return;
    refuse("table: " + std::string(name), "a positive int", value ? *value : Json());
  };
  if (!row.is_object() || row.size() != 3 || !settings || !settings->is_object()) {
    refuse("table: a row", "an object of batch, context and settings", row);
  }
  positive("batch", solution.batch);
  positive("context", solution.context);
  const std::string pair =
      "batch " + std::to_string(solution.batch) + ", context " + std::to_string(solution.context);
  if (!seen.insert({solution.batch, solution.context}).second) {
    throw ConfigError("table: one solution per pair, got two for " + pair);
  }
  check_names("table: a solution must set only", *settings, names_of(true));
  try {
    solution.settings = settings_from(fields, settings);
  } catch (const ConfigError& error) {
    throw ConfigError("table: " + pair + ": " + error.what());
  }
  return solution;
}

SwapConfig config_from(const Json& fields) {
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
  if (fields.contains("table") && !given("table").is_array()) {
    refuse("table", "a list of solutions", given("table"));
  }
  config.settings = settings_from(fields, nullptr);
  std::set<Pair> seen;
  for (const Json& row : given("table")) config.table.push_back(solution_from(row, fields, seen));
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
  if (!version || !version->is_number_integer() || *version != kConfigVersion) {
    throw ConfigError(where + ": version must be " + std::to_string(kConfigVersion) +
                      ", which is what this kvswap_torch reads, got " +
                      (version ? shown(*version) : "none") +
                      "; write it again with the tuner of this kvswap_torch, or use the "
                      "kvswap_torch that wrote it");
  }
  check_names(where + ": fields must be among", fields, names_of(false));
  try {
    return config_from(fields);
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

namespace {

template <typename T>
Json to_json(const T& field) {
  return field;
}
Json to_json(const Rank& field) {
  return std::visit([](const auto& rank) { return Json(rank); }, field);
}
template <typename T>
Json to_json(const std::optional<T>& field) {
  return field ? Json(*field) : Json();
}

}  // namespace

std::string settings_to_json(const Settings& settings) {
  Json fields = Json::object();
  visit_settings([&](const char* name, auto member, const auto&) {
    fields[name] = to_json(settings.*member);
  });
  fields["projection_file"] = nullptr;
  return fields.dump();
}

Settings settings_from_json(const std::string& text) {
  try {
    const Json fields = parse_json(text);
    if (!fields.is_object()) throw ConfigError("settings: must be an object");
    check_names("settings: must be among", fields, names_of(false));
    return settings_from(fields, nullptr);
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

Settings settings_from_json(const std::string&) { refuse(); }

#endif

}  // namespace kvswap
