#include "kvswap/swap_config.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include "kvswap/config_parts.h"
#include "kvswap/errors.h"
#include "kvswap/json.h"
#include "kvswap/settings_rules.h"

namespace kvswap {
namespace {

using Kind = JsonValue::Kind;

template <typename Names>
bool is_among(const Names& names, const std::string& name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

template <typename Names>
std::vector<std::string> foreign_fields(const JsonValue& object, const Names& known) {
  std::set<std::string> foreign;
  for (const JsonField& field : object.fields) {
    if (!is_among(known, field.name)) foreign.insert(field.name);
  }
  return {foreign.begin(), foreign.end()};
}

template <typename Names>
std::string named(const Names& names) {
  return joined({std::begin(names), std::end(names)});
}

/// The shape of a row, before what it sets is looked at.
void check_row(const JsonValue& row) {
  const JsonValue* settings = row.find("settings");
  if (!row.is(Kind::kObject) || row.fields.size() != 3 || !row.find("batch") ||
      !row.find("context") || !settings) {
    throw ConfigError("table: a row must have batch, context and settings, got " +
                      python_repr(row));
  }
  if (!settings->is(Kind::kObject)) {
    throw ConfigError("table: settings must be an object, got " + python_repr(*settings));
  }
  for (const char* name : {"batch", "context"}) {
    const JsonValue& value = *row.find(name);
    if (!value.is(Kind::kInteger) || value.integer < 1) {
      throw ConfigError("table: " + std::string(name) + " must be a positive int, got " +
                        python_repr(value));
    }
  }
}

/// The settings that a file's fields make, with a row's in the place of its own.
Settings settings_from(const JsonValue& fields, const JsonValue* row) {
  Settings settings;
  for (const char* name : kConfigFields) {
    const JsonValue* value = row ? row->find(name) : nullptr;
    if (!value) value = fields.find(name);
    if (value) set_field(settings, name, *value);
  }
  check_together(settings);
  return settings;
}

Solution solution_from(const JsonValue& row, const JsonValue& fields,
                       std::set<std::pair<int64_t, int64_t>>& seen) {
  Solution solution = {row.find("batch")->integer, row.find("context")->integer, {}};
  const std::string pair =
      "batch " + std::to_string(solution.batch) + ", context " + std::to_string(solution.context);
  if (!seen.insert({solution.batch, solution.context}).second) {
    throw ConfigError("table: one solution per pair, got two for " + pair);
  }
  const JsonValue& settings = *row.find("settings");
  const auto foreign = foreign_fields(settings, kSolvable);
  if (!foreign.empty()) {
    throw ConfigError("table: a solution must set only " + named(kSolvable) + ", got " +
                      joined(foreign));
  }
  try {
    solution.settings = settings_from(fields, &settings);
  } catch (const ConfigError& error) {
    throw ConfigError("table: " + pair + ": " + error.what());
  }
  return solution;
}

/// Checks in the order of SwapConfig.__post_init__, so that both tell the same mistake first.
SwapConfig config_from(const JsonValue& fields) {
  static const JsonValue empty = {.kind = Kind::kArray};
  SwapConfig config;
  const JsonValue* model = fields.find("model");
  if (model && model->is(Kind::kObject)) {
    config.model = identity_from(*model);
  } else if (model && !model->is(Kind::kNull)) {
    throw ConfigError("model: must be a ModelIdentity or None, got " + python_repr(*model));
  }
  const JsonValue* provenance = fields.find("provenance");
  if (provenance && !provenance->is(Kind::kObject)) {
    throw ConfigError("provenance: must be a mapping, got " + python_repr(*provenance));
  }
  const JsonValue& table = fields.find("table") ? *fields.find("table") : empty;
  if (!table.is(Kind::kArray)) {
    throw ConfigError("table: must be a list of solutions, got " + python_repr(table));
  }
  for (const JsonValue& row : table.items) check_row(row);
  config.settings = settings_from(fields, nullptr);
  std::set<std::pair<int64_t, int64_t>> seen;
  for (const JsonValue& row : table.items) {
    config.table.push_back(solution_from(row, fields, seen));
  }
  return config;
}

JsonValue parse_config(const std::string& text, const std::string& where) {
  const int64_t bad = find_bad_utf8(text);
  if (bad >= 0) {
    throw ConfigError(where + ": must be a readable JSON file: it is not UTF-8 at byte " +
                      std::to_string(bad));
  }
  try {
    return parse_json(text);
  } catch (const JsonError& error) {
    throw ConfigError(where + ": must be valid JSON: " + error.what() +
                      "; restore the file or tune again");
  }
}

double distance(const Solution& row, int64_t batch, int64_t context) {
  const auto doublings = [](int64_t ours, int64_t asked) {
    return std::abs(std::log2(static_cast<double>(ours) / static_cast<double>(asked)));
  };
  return doublings(row.batch, batch) + doublings(row.context, context);
}

}  // namespace

SwapConfig SwapConfig::load(const std::string& path) {
  const std::string where = "config " + path;
  const JsonValue fields = parse_config(read_file(path, where, "JSON file"), where);
  if (!fields.is(Kind::kObject)) {
    throw ConfigError(where + ": must be a JSON object, got " + python_type(fields));
  }
  const JsonValue* version = fields.find("version");
  if (!version || !version->is(Kind::kInteger) || version->integer != kConfigVersion) {
    throw ConfigError(where + ": version must be " + std::to_string(kConfigVersion) +
                      ", which is what this kvswap_torch reads, got " +
                      (version ? python_repr(*version) : "None") +
                      "; write it again with the tuner of this kvswap_torch, or use the "
                      "kvswap_torch that wrote it");
  }
  const auto unknown = foreign_fields(fields, kConfigFields);
  if (!unknown.empty()) {
    throw ConfigError(where + ": fields must be among " + named(kConfigFields) + ", got " +
                      joined(unknown));
  }
  try {
    SwapConfig config = config_from(fields);
    config.source = path;
    return config;
  } catch (const ConfigError& error) {
    throw ConfigError(where + ": " + error.what());
  }
}

const Settings& SwapConfig::for_batch_and_context(int64_t batch, int64_t context) const {
  if (batch < 1 || context < 1) {
    throw ConfigError("for_batch_and_context: both must be positive, got " + std::to_string(batch) +
                      " and " + std::to_string(context));
  }
  if (table.empty()) return settings;
  const auto rank_of = [&](const Solution& row) {
    return std::tuple(distance(row, batch, context), -row.context, -row.batch);
  };
  return std::min_element(
             table.begin(), table.end(),
             [&](const Solution& a, const Solution& b) { return rank_of(a) < rank_of(b); })
      ->settings;
}

void SwapConfig::check_model(const ModelIdentity& identity) const {
  if (model) {
    const std::string told = differences(*model, identity);
    if (!told.empty()) {
      throw ConfigError((source.empty() ? "config" : "config " + source) +
                        ": must be for the model it is used with, but was made for " + told +
                        "; calibrate this model, or leave the config out");
    }
  }
  if (identity.layers) {
    settings.ranks(*identity.layers);
    for (const int64_t layer : settings.true_query_layers) {
      if (layer < *identity.layers) continue;
      throw ConfigError("true_query_layers: must be below " + std::to_string(*identity.layers) +
                        ", the layers on disk, got " + python_repr(settings.true_query_layers));
    }
  }
  if (identity.kv_heads && identity.head_dim) {
    const int64_t width = *identity.kv_heads * *identity.head_dim;
    check_ranks(settings.rank, width);
    for (const Solution& row : table) check_ranks(row.settings.rank, width);
  }
}

std::string SwapConfig::projection_path() const {
  if (!settings.projection_file) return "";
  const size_t slash = source.rfind('/');
  return (slash == std::string::npos ? "" : source.substr(0, slash + 1)) +
         *settings.projection_file;
}

std::vector<int64_t> Settings::ranks(int64_t layers) const {
  if (const auto* one = std::get_if<int64_t>(&rank)) return std::vector<int64_t>(layers, *one);
  const auto& each = std::get<std::vector<int64_t>>(rank);
  if (static_cast<int64_t>(each.size()) != layers) {
    throw ConfigError("rank: must be one number or " + std::to_string(layers) +
                      ", one for each layer on disk, got " + std::to_string(each.size()));
  }
  return each;
}

const char* element_name(ElementType type) {
  return type == ElementType::kFloat32    ? "float32"
         : type == ElementType::kBFloat16 ? "bfloat16"
                                          : "float16";
}

ModelIdentity identity_of(const ModelShape& shape, const std::string& model_type) {
  ModelIdentity identity;
  if (!model_type.empty()) identity.model_type = model_type;
  identity.layers = shape.layers;
  identity.heads = shape.heads;
  identity.kv_heads = shape.kv_heads;
  identity.head_dim = shape.head_dim;
  identity.dtype = element_name(shape.dtype);
  return identity;
}

std::string differences(const ModelIdentity& ours, const ModelIdentity& theirs) {
  std::string told;
  const auto shown = [](const auto& value) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::string>) {
      return value;
    } else {
      return std::to_string(value);
    }
  };
  visit_identity([&](const char* name, auto member) {
    // Projections do not depend on it, and what memory is needed is counted anew.
    if (std::string_view(name) == "dtype") return;
    const auto& mine = ours.*member;
    const auto& other = theirs.*member;
    if (!mine || !other || *mine == *other) return;
    told += (told.empty() ? "" : ", ") + std::string(name) + " " + shown(*mine) +
            " (this model: " + shown(*other) + ")";
  });
  return told;
}

}  // namespace kvswap
