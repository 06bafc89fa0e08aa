// Files from elsewhere: what a header claims is checked before it is believed.

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "kvswap/cache.h"
#include "kvswap/errors.h"
#include "kvswap/json.h"
#include "kvswap/safetensors.h"

namespace kvswap {
namespace {

class Files : public testing::Test {
 protected:
  Files() {
    folder_ = std::filesystem::temp_directory_path() / "kvswap-files-XXXXXX";
    EXPECT_NE(::mkdtemp(folder_.data()), nullptr);
  }
  ~Files() override { std::filesystem::remove_all(folder_); }

  void SetUp() override {
    if (!has_json()) GTEST_SKIP() << "built without nlohmann-json";
  }

  std::string write(const std::string& bytes, const std::string& name = "file") const {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << bytes;
    return folder_ + "/" + name;
  }

  std::string tensors(const std::string& header, const std::string& data,
                      uint64_t claimed = 0) const {
    const uint64_t length = claimed ? claimed : header.size();
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    return write(bytes + header + data);
  }

  std::string refusal(const std::string& path) const {
    try {
      SafetensorsFile file(path);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "taken";
  }

  std::string folder_;
};

TEST_F(Files, TensorsAreReadAtTheirPlaces) {
  const std::string path =
      tensors(R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
              R"("b":{"dtype":"BF16","shape":[1,2],"data_offsets":[8,12]},)"
              R"("none":{"dtype":"F16","shape":[0,5],"data_offsets":[12,12]}})",
              std::string("\0\0\x80\x3f\0\0\0\xc0\x80\x3f\0\x40", 12));
  const SafetensorsFile file(path);
  EXPECT_EQ(file.metadata().at("k"), "v");
  EXPECT_EQ(as_floats(file.tensors().at("a")), (std::vector<float>{1, -2}));
  EXPECT_EQ(as_floats(file.tensors().at("b")), (std::vector<float>{1, 2}));
  EXPECT_EQ(file.tensors().at("b").shape, (std::vector<int64_t>{1, 2}));
  EXPECT_TRUE(as_floats(file.tensors().at("none")).empty());
}

TEST_F(Files, HeadersThatLieAreRefused) {
  const std::string eight(8, 'x');
  const auto one = [&](const std::string& dtype, const std::string& shape,
                       const std::string& offsets) {
    return refusal(tensors("{\"a\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
                               ",\"data_offsets\":" + offsets + "}}",
                           eight));
  };
  EXPECT_EQ(one("F32", "[2]", "[0,8]"), "taken");
  EXPECT_NE(one("F32", "[2]", "[0,9]").find("must lie in bytes 0..8"), -1ul);
  EXPECT_NE(one("F32", "[2]", "[8,16]").find("must lie in"), -1ul);
  EXPECT_NE(one("F32", "[2]", "[8,0]").find("must lie in"), -1ul);
  EXPECT_NE(one("F32", "[3]", "[0,8]").find("be 12 long"), -1ul);
  EXPECT_NE(one("F32", "[-2]", "[0,8]").find("must have dtype, shape"), -1ul);
  EXPECT_NE(one("F32", "[2]", "[0]").find("must have dtype, shape"), -1ul);
  EXPECT_NE(one("F33", "[2]", "[0,8]").find("not known, F33"), -1ul);
  EXPECT_NE(one("F32", "[4611686018427387904,4]", "[0,0]").find("larger than any file"), -1ul);
  EXPECT_NE(refusal(tensors("{}", "", 1ull << 62)).find("its header must be 2 bytes"), -1ul);
  EXPECT_NE(refusal(tensors("{}", "", 3)).find("its header must be 2 bytes"), -1ul);
  EXPECT_NE(refusal(tensors("[]", "")).find("must be a JSON object"), -1ul);
  EXPECT_NE(refusal(tensors("{\"a\"", "")).find("must be valid JSON"), -1ul);
  EXPECT_NE(refusal(write("short")).find("its header must be"), -1ul);
  EXPECT_EQ(refusal(write("")), "it is empty");
  EXPECT_NE(refusal(folder_).find("Is a directory"), -1ul);
  EXPECT_NE(refusal(folder_ + "/none").find("No such file"), -1ul);
}

#if KVSWAP_HAS_JSON

TEST_F(Files, JsonIsStrict) {
  for (const char* text :
       {"", "{", "[1,]", "{\"a\":1,\"a\":2}", "{\"b\":{\"a\":1,\"a\":2}}", "NaN", "\xEF\xBB\xBF{}",
        "01", "'a'", "\"a\xC3\"", "\"\xC0\x80\"", "\"ab\xED\xA0\x80\""}) {
    EXPECT_THROW(parse_json(text), JsonError) << text;
  }
  EXPECT_THROW(parse_json(std::string(100'000, '[')), JsonError);
  EXPECT_THROW(parse_json(std::string(5'000, '9')), JsonError);
  EXPECT_EQ(parse_json(R"([{"a": 1}, {"a": 2}, {"b": {"a": 3}}])").size(), 3u);
}

/// Where each key were compared with all before it, this would take minutes.
TEST_F(Files, ManyFieldsAreOneByOne) {
  constexpr int kFields = 200'000;
  std::string text = "{";
  for (int i = 0; i < kFields; ++i) text += "\"layers." + std::to_string(i) + ".key\":1,";
  text.back() = '}';
  const Json value = parse_json(text);
  EXPECT_EQ(value.size(), size_t{kFields});
  for (int i = 0; i < kFields; ++i) {
    ASSERT_NE(find_field(value, ("layers." + std::to_string(i) + ".key").c_str()), nullptr);
  }
}

TEST_F(Files, WhatCameIsShownInPart) {
  EXPECT_EQ(shown(parse_json(R"({"a": [1, 2.5, null, "\u00e9"]})")),
            R"({"a":[1,2.5,null,"\u00e9"]})");
  EXPECT_LT(shown(parse_json('"' + std::string(5'000, 'x') + '"')).size(), 200u);
}

#endif

TEST_F(Files, AConfigOpensASessionWithItsProjection) {
  const std::string header =
      R"({"__metadata__":{"kvswap_projection":"1","kind":"query_aware","model":"{\"layers\": 1}"},)"
      R"("layers.0.key":{"dtype":"F32","shape":[16,2],"data_offsets":[0,128]},)"
      R"("layers.0.query":{"dtype":"F32","shape":[16,2],"data_offsets":[128,256]}})";
  std::filesystem::rename(tensors(header, std::string(256, '\0')), folder_ + "/p.safetensors");
  OpenArgs args;
  args.shape = {.layers = 1, .heads = 2, .kv_heads = 1, .head_dim = 16};
  args.directory = folder_;
  args.config_path = write(
      R"({"version": 1, "rank": 2, "groups_max": 2, "pages_max": 9, "projection_file": "p.safetensors"})",
      "config.json");
  Cache session(args);
  EXPECT_EQ(session.options().ranks, std::vector<int64_t>{2});
  std::vector<float> data(16 * 100);
  session.append(0, NewTokens::packed(data.data(), data.data(), args.shape, 1, 100));
  EXPECT_FALSE(session.layer(0).needs_projection);
  args.shape.layers = 2;
  EXPECT_THROW(Cache{args}, ConfigError);
}

}  // namespace
}  // namespace kvswap
