#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

/// What libFuzzer, or driver.cpp where there is no clang, calls with ever new bytes. It returns for
/// every input; a crash, a hang or a failed CHECK is the finding.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

/// Numbers out of the input; zeros when it is used up.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool is_empty() const { return size_ == 0; }
  int64_t below(int64_t limit) {
    uint32_t number = 0;
    for (int i = 0; i < 2 && size_ > 0; ++i, ++data_, --size_) number = number << 8 | *data_;
    return static_cast<int64_t>(number) % limit;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

/// A file in memory that holds the input.
class FuzzFile {
 public:
  FuzzFile(const uint8_t* data, size_t size) : fd_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    CHECK(fd_ >= 0);
    CHECK(size == 0 || ::write(fd_, data, size) == static_cast<ssize_t>(size));
  }
  ~FuzzFile() { ::close(fd_); }
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};
