#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#if KVSWAP_HAS_JSON
#include <nlohmann/json.hpp>
#endif

namespace kvswap {

/// Whether this build can parse at all: without nlohmann-json it cannot.
bool has_json();

/// The text is no JSON: what and where.
class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

#if KVSWAP_HAS_JSON

using Json = nlohmann::json;

/// Strict JSON in UTF-8. Refuses a field given twice, depths beyond 500, a byte order mark. Throws
/// JsonError.
Json parse_json(std::string_view text);

/// A field of an object; null where there is none, or no object.
const Json* find_field(const Json& object, const char* name);

/// As messages name what came: JSON, cut where it is long.
std::string shown(const Json& value);

#endif

}  // namespace kvswap
