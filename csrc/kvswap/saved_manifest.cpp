#include "kvswap/saved_manifest.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <limits>

#include "engine/engine_options.h"
#include "kvswap/config_json.h"
#include "kvswap/errors.h"
#include "kvswap/json.h"
#include "store/checksum.h"

namespace kvswap {

#if KVSWAP_HAS_JSON

namespace {

constexpr const char* kVersionField = "kvswap_cache";
constexpr const char* kChecksumField = "checksum";
constexpr int64_t kRecordBytesMax = int64_t{1} << 30;

std::string hex(uint64_t number) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(number));
  return text;
}

uint64_t checksum_of_text(const std::string& text) {
  return checksum_of(std::as_bytes(std::span(text.data(), text.size())));
}

/// Fields of one object, each of which must be there and hold.
class Fields {
 public:
  Fields(const Json& object, std::string path) : object_(object), path_(std::move(path)) {
    if (!object_.is_object()) refuse("it", "be an object");
  }
  [[noreturn]] void refuse(const std::string& name, const std::string& must) const {
    throw SessionError(SessionError::Kind::kCorrupt,
                       "open: " + path_ + "/manifest.json is damaged: " + name + " must " + must +
                           "; save the cache again",
                       EIO, path_);
  }
  bool has(const char* name) const { return find_field(object_, name) != nullptr; }
  Fields object(const char* name) const { return {json(name), path_}; }
  const Json& json(const char* name) const {
    const Json* value = find_field(object_, name);
    if (value == nullptr) refuse(name, "be there");
    return *value;
  }
  std::string text(const char* name) const {
    if (!json(name).is_string()) refuse(name, "be a string");
    return json(name).get<std::string>();
  }
  int64_t number(const char* name, int64_t low, int64_t high) const {
    const Json& value = json(name);
    if (!value.is_number_unsigned() ||
        value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ||
        value.get<int64_t>() < low || value.get<int64_t>() > high) {
      refuse(name, "be an int from " + std::to_string(low) + " to " + std::to_string(high));
    }
    return value.get<int64_t>();
  }
  uint64_t bits(const char* name) const {
    const std::string digits = text(name);
    uint64_t number = 0;
    for (const char digit : digits) {
      const size_t value = std::string_view("0123456789abcdef").find(digit);
      if (digits.size() != 16 || value == std::string_view::npos) break;
      number = number << 4 | value;
    }
    if (hex(number) != digits) refuse(name, "be 16 hexadecimal digits");
    return number;
  }

 private:
  const Json& object_;
  std::string path_;
};

ElementType element_type(const Fields& fields) {
  const std::string name = fields.text("dtype");
  for (const ElementType type :
       {ElementType::kFloat32, ElementType::kBFloat16, ElementType::kFloat16}) {
    if (name == element_name(type)) return type;
  }
  fields.refuse("dtype", "be float32, bfloat16 or float16");
}

ModelShape shape_from(const Fields& fields) {
  const int64_t head_dim = fields.number("head_dim", 1, 1024);
  return {.layers = fields.number("layers", 1, 4096),
          .heads = fields.number("heads", 1, 4096),
          .kv_heads = fields.number("kv_heads", 1, 1024),
          .head_dim = head_dim,
          .dtype = element_type(fields),
          .sides = fields.has("sides") ? fields.number("sides", 1, 2) : 2,
          .value_dim = fields.has("value_dim") ? fields.number("value_dim", 1, head_dim) : 0};
}

/// Sizes must agree before anything is made of them.
void check_sizes(const SavedManifest& manifest, const Fields& fields) {
  const SavedCounts& counts = manifest.counts;
  const int64_t width =
      manifest.settings.heads == "each" ? manifest.shape.head_dim : manifest.shape.width();
  const std::string& records = manifest.settings.records;
  const int64_t element_bytes = records == "fp8" ? 1 : manifest.shape.element_bytes();
  const RecordShape shape = {.kv_heads = width / manifest.shape.head_dim,
                             .group_tokens = manifest.settings.group_tokens,
                             .head_dim = manifest.shape.head_dim,
                             .element_bytes = element_bytes,
                             .sides = manifest.shape.sides,
                             .value_dim = manifest.shape.value_dim};
  const auto packing = record_packing(manifest.settings, shape, DType::kFloat32);
  const int64_t payload = packing ? packing->payload_bytes() : shape.payload_bytes();
  if (counts.record_bytes < payload || counts.record_bytes % 512 != 0) {
    fields.refuse("record_bytes", "be a multiple of 512 that a group's " + std::to_string(payload) +
                                      " bytes fit in");
  }
  if (manifest.records_bytes % counts.record_bytes != 0 ||
      manifest.records_bytes / counts.record_bytes < counts.records) {
    fields.refuse("records_bytes", "be whole records, and hold all of them");
  }
  if (counts.groups * manifest.settings.group_tokens > counts.positions) {
    fields.refuse("groups", "be of the tokens that are there");
  }
}

}  // namespace

namespace {

bool has_narrow_values(const ModelShape& shape) { return shape.value_width() != shape.head_dim; }

/// The lowest one that says all of it, so that older readers open what they can.
int64_t version_of(const SavedManifest& manifest) {
  const Settings& settings = manifest.settings;
  const bool has_retained = settings.keeper != "none" && settings.keeper != "newest";
  if (has_narrow_values(manifest.shape)) return 5;
  if (settings.grouping == "clusters") return 4;
  return has_retained ? 3 : 2;
}

}  // namespace

std::string manifest_text(const SavedManifest& manifest) {
  Json facts;
  try {
    facts = parse_json(manifest.facts);
  } catch (const JsonError& error) {
    throw ConfigError(std::string("save: facts must be JSON: ") + error.what());
  }
  if (!facts.is_object()) throw ConfigError("save: facts must be a JSON object");
  const SavedCounts& counts = manifest.counts;
  Json json = {
      {kVersionField, version_of(manifest)},
      {"hash", checksum_name()},
      {"shape",
       {{"layers", manifest.shape.layers},
        {"heads", manifest.shape.heads},
        {"kv_heads", manifest.shape.kv_heads},
        {"head_dim", manifest.shape.head_dim},
        {"dtype", element_name(manifest.shape.dtype)}}},
      {"settings", parse_json(settings_to_json(manifest.settings))},
      {"ranks", manifest.ranks},
      {"sequences", counts.sequences},
      {"tokens", counts.positions},
      {"groups", counts.groups},
      {"records", counts.records},
      {"record_bytes", counts.record_bytes},
      {"seed", hex(counts.seed)},
      {"state_bytes", manifest.state_bytes},
      {"state_checksum", hex(manifest.state_checksum)},
      {"records_bytes", manifest.records_bytes},
      {"facts", facts},
  };
  if (manifest.shape.sides == 1) json["shape"]["sides"] = 1;
  if (has_narrow_values(manifest.shape)) json["shape"]["value_dim"] = manifest.shape.value_dim;
  json[kChecksumField] = hex(checksum_of_text(json.dump()));
  return json.dump(2) + "\n";
}

SavedManifest read_manifest(const std::string& text, const std::string& path) {
  Json json;
  try {
    json = parse_json(text);
  } catch (const JsonError& error) {
    throw SessionError(SessionError::Kind::kCorrupt,
                       "open: " + path + "/manifest.json is damaged: it must be JSON: " +
                           error.what() + "; save the cache again",
                       EIO, path);
  }
  const Fields fields(json, path);
  // Before anything else: a newer file may well differ in all the rest.
  const int64_t version = fields.number(kVersionField, 1, std::numeric_limits<int32_t>::max());
  if (version > kSavedVersion) {
    throw ConfigError("open: " + path + " must be of version " + std::to_string(kSavedVersion) +
                      " or lower, which this kvswap_torch reads, got " + std::to_string(version) +
                      "; use the kvswap_torch that wrote it, or a newer one");
  }
  const uint64_t checksum = fields.bits(kChecksumField);
  const std::string hash = fields.text("hash");
  if (hash != checksum_name()) {
    throw ConfigError("open: " + path + " must be checked by " + checksum_name() +
                      ", which is the one that is read, got " + hash + "; read the document again");
  }
  json.erase(kChecksumField);
  if (checksum_of_text(json.dump()) != checksum) fields.refuse("its checksum", "hold");
  SavedManifest manifest;
  manifest.shape = shape_from(fields.object("shape"));
  try {
    manifest.settings =
        settings_from_json(fields.json("settings").dump(), std::min<int64_t>(version, 2));
  } catch (const ConfigError& error) {
    // The checksum holds: these are settings of another version, not damage.
    throw ConfigError("open: " + path + " must have settings that this kvswap_torch knows: " +
                      error.what() + "; open it with the kvswap_torch that wrote it");
  }
  const Json& ranks = fields.json("ranks");
  for (const Json& rank : ranks) {
    const bool is_rank = rank.is_number_unsigned() && rank.get<uint64_t>() >= 1 &&
                         rank.get<uint64_t>() <= static_cast<uint64_t>(manifest.shape.width());
    if (!is_rank) fields.refuse("ranks", "be of the model's width at most");
    manifest.ranks.push_back(rank.get<int64_t>());
  }
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  constexpr int64_t kBytes = std::numeric_limits<int64_t>::max() / 4;
  manifest.counts = {
      .sequences = fields.number("sequences", 1, kBatchMax * manifest.shape.kv_heads),
      .positions = fields.number("tokens", 1, kContextMax),
      .groups = fields.number("groups", 0, kContextMax),
      .records = fields.number("records", 0, kMost),
      .record_bytes = fields.number("record_bytes", 512, kRecordBytesMax),
      .seed = fields.bits("seed")};
  manifest.state_bytes = fields.number("state_bytes", 10, kBytes);
  manifest.state_checksum = fields.bits("state_checksum");
  manifest.records_bytes = fields.number("records_bytes", 0, kBytes);
  if (!fields.json("facts").is_object()) fields.refuse("facts", "be an object");
  manifest.facts = fields.json("facts").dump();
  check_sizes(manifest, fields);
  return manifest;
}

#else

std::string manifest_text(const SavedManifest&) {
  throw ConfigError("save: this kvswap_torch was built without nlohmann-json and cannot save");
}

SavedManifest read_manifest(const std::string&, const std::string&) {
  throw ConfigError("open: this kvswap_torch was built without nlohmann-json and cannot open");
}

#endif

}  // namespace kvswap
