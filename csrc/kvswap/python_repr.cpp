#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "kvswap/json.h"

namespace kvswap {
namespace {

/// The shortest digits that read back as the same number, in Python's choice of notation.
std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char text[512];
  auto end = std::to_chars(text, text + sizeof(text), value, std::chars_format::scientific).ptr;
  const std::string scientific(text, end);
  const int exponent = std::atoi(scientific.c_str() + scientific.find('e') + 1);
  if (value != 0 && (exponent < -4 || exponent >= 16)) return scientific;
  end = std::to_chars(text, text + sizeof(text), value, std::chars_format::fixed).ptr;
  const std::string fixed(text, end);
  return fixed.find('.') == std::string::npos ? fixed + ".0" : fixed;
}

}  // namespace

std::string python_repr(const std::string& text) {
  const bool has_single = text.find('\'') != std::string::npos;
  const char quote = has_single && text.find('"') == std::string::npos ? '"' : '\'';
  std::string shown(1, quote);
  for (const char letter : text) {
    const auto byte = static_cast<unsigned char>(letter);
    if (letter == quote || letter == '\\') {
      shown += {'\\', letter};
    } else if (letter == '\n' || letter == '\r' || letter == '\t') {
      shown += {'\\', letter == '\n' ? 'n' : letter == '\r' ? 'r' : 't'};
    } else if (byte < 0x20 || byte == 0x7F) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\x%02x", byte);
      shown += escape;
    } else {
      shown += letter;
    }
  }
  return shown + quote;
}

std::string python_repr(const std::vector<int64_t>& numbers) {
  std::string shown = "[";
  for (const int64_t number : numbers) {
    shown += (shown.size() > 1 ? ", " : "") + std::to_string(number);
  }
  return shown + "]";
}

std::string python_repr(const JsonValue& value) {
  using Kind = JsonValue::Kind;
  std::string inside;
  switch (value.kind) {
    case Kind::kNull:
      return "None";
    case Kind::kBool:
      return value.boolean ? "True" : "False";
    case Kind::kInteger:
      return std::to_string(value.integer);
    case Kind::kLongInteger:
      return value.text;
    case Kind::kFloat:
      return float_repr(value.number);
    case Kind::kString:
      return python_repr(value.text);
    case Kind::kArray:
      for (const JsonValue& item : value.items) {
        inside += (inside.empty() ? "" : ", ") + python_repr(item);
      }
      return "[" + inside + "]";
    case Kind::kObject:
      for (const JsonField& field : value.fields) {
        inside += (inside.empty() ? "" : ", ") + python_repr(field.name) + ": " +
                  python_repr(field.value);
      }
      return "{" + inside + "}";
  }
  return "";
}

const char* python_type(const JsonValue& value) {
  using Kind = JsonValue::Kind;
  switch (value.kind) {
    case Kind::kNull:
      return "NoneType";
    case Kind::kBool:
      return "bool";
    case Kind::kInteger:
    case Kind::kLongInteger:
      return "int";
    case Kind::kFloat:
      return "float";
    case Kind::kString:
      return "str";
    case Kind::kArray:
      return "list";
    case Kind::kObject:
      return "dict";
  }
  return "";
}

}  // namespace kvswap
