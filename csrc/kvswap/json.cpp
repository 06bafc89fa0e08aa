#include "kvswap/json.h"

#include <limits>

#include "kvswap/errors.h"

#if KVSWAP_HAS_JSON
#include <nlohmann/json.hpp>
#endif

namespace kvswap {

const JsonValue* JsonValue::find(std::string_view name) const {
  for (const JsonField& field : fields) {
    if (field.name == name) return &field.value;
  }
  return nullptr;
}

#if KVSWAP_HAS_JSON

namespace {

constexpr size_t kDepthMax = 500;
constexpr size_t kDigitsMax = 4300;  // as Python's int() takes

/// Builds a JsonValue from the parser's events.
class Builder : public nlohmann::json_sax<nlohmann::json> {
 public:
  using Kind = JsonValue::Kind;

  bool null() override { return add({}); }
  bool boolean(bool value) override { return add({.kind = Kind::kBool, .boolean = value}); }
  bool number_integer(int64_t value) override {
    return add({.kind = Kind::kInteger, .integer = value});
  }
  bool number_unsigned(uint64_t value) override {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return add({.kind = Kind::kLongInteger, .text = std::to_string(value)});
    }
    return add({.kind = Kind::kInteger, .integer = static_cast<int64_t>(value)});
  }
  bool number_float(double value, const std::string& digits) override {
    if (digits.find_first_of(".eE") != std::string::npos) {
      return add({.kind = Kind::kFloat, .number = value});
    }
    if (digits.size() > kDigitsMax) throw JsonError("an integer has too many digits");
    return add({.kind = Kind::kLongInteger, .text = digits});
  }
  bool string(std::string& value) override {
    return add({.kind = Kind::kString, .text = std::move(value)});
  }
  bool binary(nlohmann::json::binary_t&) override { return false; }
  bool start_object(size_t) override { return open(Kind::kObject); }
  bool start_array(size_t) override { return open(Kind::kArray); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(std::string& name) override {
    JsonValue& object = *open_.back();
    if (object.find(name)) throw JsonError("a field must be given once, got " + name + " again");
    object.fields.push_back({std::move(name), {}});
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) override {
    // "[json.exception.parse_error.101] parse error at ...": the first word is the library's.
    const std::string what = error.what();
    const size_t end = what.find("] ");
    throw JsonError(end == std::string::npos ? what : what.substr(end + 2));
  }

  JsonValue root;

 private:
  JsonValue* add(JsonValue&& value, bool) {
    if (open_.empty()) {
      root = std::move(value);
      return &root;
    }
    JsonValue& parent = *open_.back();
    if (parent.is(Kind::kArray)) return &parent.items.emplace_back(std::move(value));
    return &(parent.fields.back().value = std::move(value));
  }
  bool add(JsonValue&& value) { return add(std::move(value), true) != nullptr; }
  bool open(Kind kind) {
    if (open_.size() >= kDepthMax) throw JsonError("values are nested too deeply");
    open_.push_back(add({.kind = kind}, true));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  // A parent's vector grows only while its last element is closed, so these stay where they are.
  std::vector<JsonValue*> open_;
};

}  // namespace

bool has_json() { return true; }

JsonValue parse_json(std::string_view text) {
  if (text.starts_with("\xEF\xBB\xBF")) throw JsonError("it begins with a byte order mark");
  Builder builder;
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return std::move(builder.root);
}

#else

bool has_json() { return false; }

JsonValue parse_json(std::string_view) {
  throw ConfigError(
      "json: this build of kvswap reads no config, projection or other JSON; install "
      "nlohmann-json3-dev (Debian) and build kvswap again");
}

#endif

int64_t find_bad_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    const int more = first < 0x80                    ? 0
                     : first >= 0xC2 && first < 0xE0 ? 1
                     : first >= 0xE0 && first < 0xF0 ? 2
                     : first >= 0xF0 && first < 0xF5 ? 3
                                                     : -1;
    if (more < 0 || i + more >= text.size()) return static_cast<int64_t>(i);
    uint32_t point = more == 0 ? first : first & (0x3F >> more);
    for (int j = 1; j <= more; ++j) {
      const auto next = static_cast<unsigned char>(text[i + j]);
      if ((next & 0xC0) != 0x80) return static_cast<int64_t>(i);
      point = point << 6 | (next & 0x3F);
    }
    const bool is_long = (more == 2 && point < 0x800) || (more == 3 && point < 0x10000);
    if (is_long || point > 0x10FFFF || (point >= 0xD800 && point < 0xE000)) {
      return static_cast<int64_t>(i);
    }
    i += more + 1;
  }
  return -1;
}

}  // namespace kvswap
