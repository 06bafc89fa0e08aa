#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "io/data_file.h"

namespace kvswap {

/// A directory of its own for a test, on the disk (TMPDIR) or in memory (/dev/shm).
class TempDirectory {
 public:
  explicit TempDirectory(const std::string& parent = std::filesystem::temp_directory_path()) {
    std::string path = parent + "/kvswap-test-XXXXXX";
    EXPECT_NE(::mkdtemp(path.data()), nullptr);
    path_ = path;
  }
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  const std::string& path() const { return path_; }
  bool is_empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::string path_;
};

/// Memory aligned for O_DIRECT.
class AlignedBytes {
 public:
  explicit AlignedBytes(size_t size, size_t alignment = 4096)
      : size_(size),
        data_(static_cast<std::byte*>(
            std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment))) {
    std::fill_n(data_.get(), size_, std::byte{0xee});
  }

  std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }
  std::span<std::byte> span() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  size_t size_;
  std::unique_ptr<std::byte, Free> data_;
};

inline void fill_random(std::span<std::byte> bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (size_t at = 0; at < bytes.size(); at += 8) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + at, &word, std::min<size_t>(8, bytes.size() - at));
  }
}

template <typename T>
T must(Result<T> result) {
  EXPECT_TRUE(result.is_ok()) << (result.is_ok() ? "" : result.status().message());
  return std::move(result.value());
}

inline void must(const Status& status) { ASSERT_TRUE(status.is_ok()) << status.message(); }

/// A data file that holds `bytes` from offset 0 on.
inline std::unique_ptr<DataFile> file_with(const std::string& directory, IoMode mode,
                                           std::span<const std::byte> bytes) {
  auto file = must(DataFile::open(
      {.directory = directory, .mode = mode, .extend_bytes = static_cast<int64_t>(bytes.size())}));
  must(file->write(0, bytes));
  return file;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace kvswap
