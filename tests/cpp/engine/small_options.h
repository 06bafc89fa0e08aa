#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "engine/engine_options.h"

namespace kvswap {

/// A directory of its own for a test, on the disk.
class TestDirectory {
 public:
  TestDirectory() {
    path_ = std::filesystem::temp_directory_path() / "kvswap-engine-XXXXXX";
    EXPECT_NE(::mkdtemp(path_.data()), nullptr);
  }
  ~TestDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  bool is_empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::string path_;
};

/// Two layers of a small model; a group's record fills at least a block of O_DIRECT.
inline EngineOptions small_options(const std::string& directory, int64_t group_tokens = 4) {
  EngineOptions options;
  options.layers = 2;
  options.query_heads = 4;
  options.kv_heads = 2;
  options.head_dim = std::max<int64_t>(8, 128 / group_tokens);
  options.directory = directory;
  options.file_extend_bytes = 1 << 20;
  options.group_tokens = group_tokens;
  options.ranks = {5, 8};
  options.groups_max = 4;
  options.pages_max = 8;
  options.sink_tokens = 4;
  options.tail_tokens = 8;
  options.select_queries_max = 4;
  return options;
}

}  // namespace kvswap
