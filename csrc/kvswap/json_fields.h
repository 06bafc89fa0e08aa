#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "kvswap/errors.h"
#include "kvswap/json.h"
#include "kvswap/settings.h"

#if KVSWAP_HAS_JSON

namespace kvswap {

// Values of JSON as settings' own types, and back.

[[noreturn]] inline void refuse(const std::string& name, const std::string& must, const Json& got) {
  throw ConfigError(name + ": must be " + must + ", got " + shown(got));
}

// take(): a value of the field's own type; false where it is of another.

inline bool take(const Json& value, int64_t& field) {
  const auto most = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned() && value.get<uint64_t>() > most) return false;
  field = value.get<int64_t>();
  return true;
}

inline bool take(const Json& value, double& field) {
  if (value.is_number_float()) field = value.get<double>();
  return value.is_number_float();
}

inline bool take(const Json& value, bool& field) {
  if (value.is_boolean()) field = value.get<bool>();
  return value.is_boolean();
}

inline bool take(const Json& value, std::string& field) {
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

inline bool take(const Json& value, Rank& field) {
  if (value.is_array()) return take(value, field.emplace<std::vector<int64_t>>());
  return take(value, field.emplace<int64_t>());
}

template <typename T>
bool take(const Json& value, std::optional<T>& field) {
  field.reset();
  return value.is_null() || take(value, field.emplace());
}

/// Throws unless every field of `object` is among `known`; `must` says what then.
inline void check_names(const std::string& must, const Json& object,
                        const std::vector<std::string>& known) {
  std::string all;
  for (const std::string& name : known) all += (all.empty() ? "" : ", ") + name;
  const std::set<std::string> names(known.begin(), known.end());
  for (const auto& [name, value] : object.items()) {
    if (!names.contains(name)) throw ConfigError(must + " " + all + ", got " + name);
  }
}

template <typename T>
Json to_json(const T& field) {
  return field;
}
inline Json to_json(const Rank& field) {
  return std::visit([](const auto& rank) { return Json(rank); }, field);
}
template <typename T>
Json to_json(const std::optional<T>& field) {
  return field ? Json(*field) : Json();
}

}  // namespace kvswap

#endif
