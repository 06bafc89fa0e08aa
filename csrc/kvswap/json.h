#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace kvswap {

struct JsonField;

/// A value as it stood in the file: fields in order, an integer of any length told from a float.
struct JsonValue {
  enum class Kind { kNull, kBool, kInteger, kLongInteger, kFloat, kString, kArray, kObject };

  Kind kind = Kind::kNull;
  bool boolean = false;
  int64_t integer = 0;
  double number = 0;
  std::string text = {};  // of a string; the digits of an integer beyond int64_t
  std::vector<JsonValue> items = {};
  std::vector<JsonField> fields = {};

  bool is(Kind other) const { return kind == other; }
  /// The field of an object; null when there is none.
  const JsonValue* find(std::string_view name) const;
};

struct JsonField {
  std::string name;
  JsonValue value;
};

/// The text is no JSON: what and where.
class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Strict JSON in UTF-8. Refuses a field given twice, depths beyond 500, a byte order mark. Throws
/// JsonError, and ConfigError in a build without nlohmann-json.
JsonValue parse_json(std::string_view text);

/// Whether this build can parse at all.
bool has_json();

/// Where the text stops being UTF-8; -1: it is UTF-8 throughout.
int64_t find_bad_utf8(std::string_view text);

/// As Python's repr() shows it, which is how messages name what came.
std::string python_repr(const JsonValue& value);
std::string python_repr(const std::string& text);
std::string python_repr(const std::vector<int64_t>& numbers);

/// What Python calls the value's type.
const char* python_type(const JsonValue& value);

}  // namespace kvswap
