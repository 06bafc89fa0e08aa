#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kvswap/cache.h"

namespace kvswap {

/// A folder of a test's own.
class Folder {
 public:
  Folder() {
    path_ = std::filesystem::temp_directory_path() / "kvswap-saved-XXXXXX";
    EXPECT_NE(::mkdtemp(path_.data()), nullptr);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  std::string operator/(const char* name) const { return path_ + "/" + name; }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      names.push_back(entry.path().filename());
    return names;
  }

 private:
  std::string path_;
};

inline CacheOptions options_in(const std::string& directory) {
  CacheOptions options;
  options.shape = {.layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 16};
  options.settings.rank = 8;
  options.settings.groups_max = 200;
  options.settings.pages_max = 200;
  options.settings.tail_tokens = 8;
  options.directory = directory;
  return options;
}

/// One forward pass of drawn tokens; the last layer's output.
inline std::vector<float> step(Cache& session, int64_t tokens, uint64_t seed) {
  const ModelShape shape = {.layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 16};
  std::mt19937_64 random(seed);
  const auto draw = [&](int64_t heads) {
    std::normal_distribution<float> normal;
    std::vector<float> numbers(heads * tokens * shape.head_dim);
    for (float& number : numbers) number = normal(random);
    return numbers;
  };
  const auto keys = draw(shape.kv_heads), values = draw(shape.kv_heads), query = draw(shape.heads);
  std::vector<float> output(query.size());
  const bool is_short = tokens <= session.options().settings.select_queries_max;
  session.begin_pass(is_short ? Pass::kDecode : Pass::kPrefill);
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    session.append(layer, NewTokens::packed(keys.data(), values.data(), shape, 1, tokens));
    session.attend(layer, Queries::packed(query.data(), shape.heads, tokens, shape.head_dim), 0.25f,
                   output.data());
  }
  return output;
}

inline std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace kvswap
