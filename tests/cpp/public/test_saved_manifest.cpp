#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <string>

#include "kvswap/errors.h"
#include "kvswap/json.h"
#include "kvswap/saved_manifest.h"
#include "store/checksum.h"

namespace kvswap {
namespace {

#if KVSWAP_HAS_JSON

SavedManifest some_manifest() {
  SavedManifest manifest;
  manifest.shape = {.layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 16};
  manifest.settings.group_tokens = 4;
  manifest.settings.heads = "each";
  manifest.settings.score = "max_mass";
  manifest.settings.rank = Rank(int64_t{8});
  manifest.ranks = {8, 8};
  manifest.counts = {.sequences = 4,
                     .positions = 100,
                     .groups = 20,
                     .records = 160,
                     .record_bytes = 512,
                     .seed = 0xfedcba9876543210};
  manifest.state_bytes = 1000;
  manifest.state_checksum = 1;
  manifest.records_bytes = 160 * 512;
  manifest.facts = "{\"n\":1.5}";
  return manifest;
}

/// The manifest's text with a change, and a checksum that holds.
std::string changed(const std::function<void(Json&)>& change) {
  Json json = parse_json(manifest_text(some_manifest()));
  json.erase("checksum");
  change(json);
  const std::string text = json.dump();
  char sum[17];
  std::snprintf(sum, sizeof(sum), "%016llx",
                static_cast<unsigned long long>(
                    checksum_of(std::as_bytes(std::span(text.data(), text.size())))));
  json["checksum"] = sum;
  return json.dump();
}

TEST(SavedManifest, SaysWhereKeysAreTheValues) {
  SavedManifest manifest = some_manifest();
  const std::string usual = manifest_text(manifest);
  EXPECT_EQ(usual.find("sides"), std::string::npos) << "an older reader takes it too";
  EXPECT_EQ(read_manifest(usual, "book").shape.sides, 2);
  manifest.shape.sides = 1;
  EXPECT_EQ(read_manifest(manifest_text(manifest), "book").shape.sides, 1);
}

TEST(SavedManifest, SaysHowWideValuesAre) {
  SavedManifest manifest = some_manifest();
  manifest.shape.value_dim = manifest.shape.head_dim;
  EXPECT_EQ(manifest_text(manifest), manifest_text(some_manifest())) << "an older reader takes it";
  manifest.shape.value_dim = 8;
  const std::string narrow = manifest_text(manifest);
  EXPECT_NE(narrow.find("\"kvswap_cache\": 5"), std::string::npos) << "an older reader refuses it";
  EXPECT_EQ(read_manifest(narrow, "book").shape.value_dim, 8);
  // Records of 16 and 8 numbers, where those of 16 and 16 would not fit.
  manifest.settings.group_tokens = 5;
  EXPECT_EQ(read_manifest(manifest_text(manifest), "book").counts.record_bytes, 512);
  manifest.shape.value_dim = 0;
  EXPECT_THROW(read_manifest(manifest_text(manifest), "book"), SessionError);
  manifest.shape.value_dim = 17;
  EXPECT_THROW(read_manifest(manifest_text(manifest), "book"), SessionError);
}

TEST(SavedManifest, ComesBackAsItWas) {
  const SavedManifest read = read_manifest(manifest_text(some_manifest()), "book");
  EXPECT_EQ(read.settings.heads, "each");
  EXPECT_EQ(read.settings.score, "max_mass");
  EXPECT_EQ(read.settings.group_tokens, 4);
  EXPECT_EQ(read.ranks, (std::vector<int64_t>{8, 8}));
  EXPECT_EQ(read.counts.seed, 0xfedcba9876543210);
  EXPECT_EQ(read.counts.records, 160);
  EXPECT_EQ(read.facts, "{\"n\":1.5}");
  EXPECT_EQ(manifest_text(read), manifest_text(some_manifest()));
}

TEST(SavedManifest, ASettingThatIsUnknownIsNamed) {
  try {
    read_manifest(changed([](Json& json) { json["settings"]["colour"] = "blue"; }), "book");
    FAIL() << "was read";
  } catch (const ConfigError& error) {
    const std::string said = error.what();
    EXPECT_NE(said.find("book must have settings that this"), std::string::npos) << said;
    EXPECT_NE(said.find("got colour"), std::string::npos) << said;
  }
}

TEST(SavedManifest, NumbersThatLieAreRefusedByName) {
  const std::pair<const char*, Json> lies[] = {
      {"tokens", 10},       {"groups", 26},         {"record_bytes", 513}, {"record_bytes", 0},
      {"records_bytes", 7}, {"records", 161},       {"sequences", -1},     {"seed", "xyz"},
      {"ranks", {8, 1000}}, {"state_bytes", 1e300}, {"facts", "none"},     {"shape", nullptr},
  };
  for (const auto& [name, value] : lies) {
    SCOPED_TRACE(name);
    EXPECT_THROW(
        {
          try {
            read_manifest(changed([&](Json& json) { json[name] = value; }), "book");
          } catch (const SessionError& error) {
            EXPECT_NE(std::string(error.what()).find("manifest.json is damaged"), std::string::npos)
                << error.what();
            throw;
          }
        },
        SessionError);
  }
}

#endif

}  // namespace
}  // namespace kvswap
