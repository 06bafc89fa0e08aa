#include "kvswap/json.h"

#include <set>
#include <vector>

namespace kvswap {

#if KVSWAP_HAS_JSON

namespace {

constexpr int kDepthMax = 500;
constexpr size_t kShownBytes = 120;

/// Sees every event of a parse: nothing may be given twice, nothing may nest for ever.
class Strict {
 public:
  bool operator()(int depth, Json::parse_event_t event, Json& parsed) {
    using Event = Json::parse_event_t;
    if (depth > kDepthMax) {
      throw JsonError("nested more than " + std::to_string(kDepthMax) + " deep");
    }
    if (event == Event::object_start) names_.emplace_back();
    if (event == Event::object_end) names_.pop_back();
    if (event == Event::key && !names_.back().insert(parsed.get<std::string>()).second) {
      throw JsonError("a field must be given once, got " + parsed.get<std::string>() + " again");
    }
    return true;
  }

 private:
  std::vector<std::set<std::string>> names_;  // of each object that is open
};

}  // namespace

bool has_json() { return true; }

Json parse_json(std::string_view text) {
  if (text.starts_with("\xef\xbb\xbf")) throw JsonError("it begins with a byte order mark");
  // The parser takes one for the end, and what follows it for nothing.
  if (text.find('\0') != text.npos) throw JsonError("it has a NUL byte");
  Strict strict;
  try {
    return Json::parse(text, [&](int depth, Json::parse_event_t event, Json& parsed) {
      return strict(depth, event, parsed);
    });
  } catch (const Json::exception& error) {
    throw JsonError(error.what());
  }
}

const Json* find_field(const Json& object, const char* name) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(name);
  return found == object.end() ? nullptr : &*found;
}

std::string shown(const Json& value) {
  const std::string text = value.dump(-1, ' ', true);
  return text.size() <= kShownBytes ? text : text.substr(0, kShownBytes) + "...";
}

#else

bool has_json() { return false; }

#endif

}  // namespace kvswap
