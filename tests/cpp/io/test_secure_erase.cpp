// What was written to a file is zeros before its space is free again, if that was asked.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "faulty_kernel.h"
#include "io/anonymous_file.h"
#include "io/data_file.h"
#include "io/wait_policy.h"
#include "test_files.h"

namespace kvswap {
namespace {

constexpr int64_t kBytes = (1 << 20) + 8192;  // more than one call

/// Linux, and a copy of what the file holds when it is made empty.
class WatchingKernel final : public Syscalls {
 public:
  WatchingKernel() { use_syscalls(this); }
  ~WatchingKernel() override { use_syscalls(nullptr); }

  int ftruncate(int fd, int64_t size_bytes) override {
    if (size_bytes == 0) {
      const AlignedBytes all(kBytes);
      EXPECT_EQ(::pread(fd, all.data(), kBytes, 0), kBytes);
      last_.assign(all.data(), all.data() + kBytes);
    }
    return Syscalls::ftruncate(fd, size_bytes);
  }
  const std::vector<std::byte>& last() const { return last_; }

 private:
  std::vector<std::byte> last_;
};

TEST(Wiping, LeavesZerosWhereSomethingWasWritten) {
  const TempDirectory directory;
  AlignedBytes content(kBytes);
  fill_random(content.span(), 17);
  for (const IoMode mode : {IoMode::kAuto, IoMode::kBuffered}) {
    for (const bool is_wiped : {false, true}) {
      WatchingKernel kernel;
      auto file =
          must(DataFile::open({.directory = directory.path(), .mode = mode, .is_wiped = is_wiped}));
      must(file->write(4096, content.span().first(kBytes - 4096)));
      must(file->write(0, content.span().first(4096)));
      file.reset();
      const bool holds_zeros = kernel.last() == std::vector<std::byte>(kBytes);
      EXPECT_EQ(holds_zeros, is_wiped);
    }
  }
}

TEST(Wiping, LeavesWhatHasANameAndNoMoreThanThereIs) {
  const TempDirectory directory;
  AlignedBytes content(kBytes);
  fill_random(content.span(), 18);
  auto file = must(DataFile::open({.directory = directory.path(), .is_wiped = true}));
  must(file->write(0, content.span()));
  const OwnedFd other(::dup(file->fd()));
  file->keep();
  file.reset();
  const AlignedBytes kept(kBytes);
  ASSERT_EQ(::pread(other.get(), kept.data(), kBytes, 0), kBytes);
  EXPECT_EQ(std::memcmp(kept.data(), content.data(), kBytes), 0);

  FaultyKernel kernel;
  file = must(DataFile::open({.directory = directory.path(), .is_wiped = true}));
  must(file->write(0, content.span()));
  must(file->shrink(8192));
  kernel.arm({.call = KernelCall::kWrite, .is_lasting = true, .delay_us = 1});
  file.reset();
  EXPECT_EQ(kernel.injected(), 1u);
}

TEST(Wiping, OfADiskThatFailsIsSaid) {
  const TempDirectory directory;
  AlignedBytes content(kBytes);
  FaultyKernel kernel;
  std::vector<std::string> said;
  set_log([&](const std::string& line) { said.push_back(line); });
  for (const int error : {EAGAIN, EIO}) {
    auto file = must(DataFile::open({.directory = directory.path(), .is_wiped = true}));
    must(file->write(0, content.span()));
    kernel.arm({.call = KernelCall::kWrite, .nth = 2, .error_number = error});
    said.clear();
    file.reset();
    kernel.heal();
    EXPECT_EQ(kernel.injected(), 1u);
    ASSERT_EQ(said.size(), error == EIO ? 1u : 0u);
    for (const std::string& line : said) EXPECT_TRUE(contains(line, "could not be wiped")) << line;
  }
  set_log(nullptr);
}

}  // namespace
}  // namespace kvswap
