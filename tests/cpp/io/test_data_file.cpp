#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "io/anonymous_file.h"
#include "io/data_file.h"
#include "io/syscalls.h"
#include "test_files.h"

namespace kvswap {
namespace {

Status open_status(const DataFileOptions& options) {
  const auto file = DataFile::open(options);
  return file.is_ok() ? Status::ok() : file.status();
}

void expect_says(const Status& status, StatusCode code, std::initializer_list<std::string> parts) {
  EXPECT_EQ(status.code(), code) << status.message();
  for (const std::string& part : parts) {
    EXPECT_TRUE(contains(status.message(), part)) << part << " in: " << status.message();
  }
}

TEST(DataFile, GivesBackWhatWasWritten) {
  for (const IoMode mode : {IoMode::kAuto, IoMode::kBuffered}) {
    const TempDirectory directory;
    AlignedBytes written(1 << 20);
    fill_random(written.span(), 31);
    const auto file = file_with(directory.path(), mode, written.span());
    const AlignedBytes read(written.size());
    ASSERT_EQ(::pread(file->fd(), read.data(), read.size(), 0), static_cast<ssize_t>(read.size()));
    EXPECT_EQ(std::memcmp(read.data(), written.data(), read.size()), 0);
    EXPECT_GE(file->allocated_bytes(), static_cast<int64_t>(written.size()));
    const int64_t alignment = file->alignment_bytes();
    EXPECT_GE(alignment, 512);
    EXPECT_EQ(alignment & (alignment - 1), 0);
    if (mode == IoMode::kBuffered) {
      EXPECT_FALSE(file->is_direct());
      EXPECT_TRUE(file->fallbacks().empty());
    }
    file->drop_cached(0, 1 << 20);
  }
}

/// Linux on a disk that takes nothing from the page cache.
class LosingKernel final : public Syscalls {
 public:
  explicit LosingKernel(int error_number) : error_number_(error_number) { use_syscalls(this); }
  ~LosingKernel() override { use_syscalls(nullptr); }
  int write_back(int, int64_t, int64_t) override { return -error_number_; }
  int error_number_;
};

TEST(DataFile, WhatThePageCacheLosesIsAnErrorForGood) {
  const TempDirectory directory;
  LosingKernel kernel(EIO);
  const auto file =
      must(DataFile::open({.directory = directory.path(), .mode = IoMode::kBuffered}));
  const AlignedBytes bytes(9 << 20);
  expect_says(file->write(0, bytes.span()), StatusCode::kStorage,
              {"must reach the disk", directory.path(), "records are lost"});
  kernel.error_number_ = 0;
  const AlignedBytes block(4096);
  for (const Status& later : {file->write(0, block.span()), file->shrink(4096)}) {
    expect_says(later, StatusCode::kStorage, {"must reach the disk"});
  }
}

TEST(DataFile, AKernelThatDoesNotTellOfItsPageCacheIsNoLoss) {
  const TempDirectory directory;
  const LosingKernel kernel(ENOSYS);
  const auto file =
      must(DataFile::open({.directory = directory.path(), .mode = IoMode::kBuffered}));
  const AlignedBytes bytes(9 << 20);
  EXPECT_TRUE(file->write(0, bytes.span()).is_ok());
}

TEST(DataFile, HasNoNameAndIsPrivate) {
  const TempDirectory directory;
  const auto file = must(DataFile::open({.directory = directory.path()}));
  EXPECT_TRUE(directory.is_empty());
  struct stat facts{};
  ASSERT_EQ(::fstat(file->fd(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0600u);
  EXPECT_EQ(facts.st_nlink, 0u);
  EXPECT_TRUE(::fcntl(file->fd(), F_GETFD) & FD_CLOEXEC);
}

TEST(DataFile, TheNamedWayLeavesNothingEither) {
  const TempDirectory directory;
  const OwnedFd file = must(create_and_unlink_file(directory.path()));
  EXPECT_TRUE(directory.is_empty());
  struct stat facts{};
  ASSERT_EQ(::fstat(file.get(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0600u);
  EXPECT_EQ(::pwrite(file.get(), "abc", 3, 0), 3);
}

TEST(DataFile, MissingDirectoryIsNamed) {
  expect_says(open_status({.directory = "/no/such/place"}), StatusCode::kInvalid,
              {"must exist", "/no/such/place", "create it"});
  expect_says(open_status({.directory = ""}), StatusCode::kInvalid, {"must exist"});
}

TEST(DataFile, PathThatIsNoDirectoryIsNamed) {
  const TempDirectory directory;
  const std::string path = directory.path() + "/plain";
  std::ofstream(path) << "x";
  expect_says(open_status({.directory = path}), StatusCode::kInvalid,
              {"must be a directory", path});
}

TEST(DataFile, DirectoryThatIsNotWritableIsNamed) {
  const TempDirectory directory;
  ASSERT_EQ(::chmod(directory.path().c_str(), 0555), 0);
  // For files, this thread is now somebody without root's powers.
  const int before = ::setfsuid(65534);
  const Status status = open_status({.directory = directory.path()});
  ::setfsuid(static_cast<uid_t>(before));
  expect_says(status, StatusCode::kInvalid, {"must be writable", directory.path()});
  EXPECT_TRUE(directory.is_empty());
}

TEST(DataFile, DirectIsRefusedOrWorks) {
  const TempDirectory directory("/dev/shm");
  const auto file = DataFile::open({.directory = directory.path(), .mode = IoMode::kDirect});
  if (file.is_ok()) {
    EXPECT_TRUE(file.value()->is_direct());
    return;
  }
  expect_says(file.status(), StatusCode::kStorage, {"O_DIRECT", directory.path(), "buffered"});
  const auto fallen = must(DataFile::open({.directory = directory.path()}));
  EXPECT_FALSE(fallen->is_direct());
  ASSERT_EQ(fallen->fallbacks().size(), 1u);
}

TEST(DataFile, ReservesInStepsAndWithinItsQuota) {
  const TempDirectory directory;
  const auto file = must(DataFile::open(
      {.directory = directory.path(), .quota_bytes = 10 << 20, .extend_bytes = 4 << 20}));
  EXPECT_EQ(file->allocated_bytes(), 0);
  must(file->reserve(1));
  EXPECT_EQ(file->allocated_bytes(), 4 << 20);
  must(file->reserve(9 << 20));
  EXPECT_EQ(file->allocated_bytes(), 10 << 20);
  must(file->reserve(1));
  const Status status = file->reserve((10 << 20) + 1);
  expect_says(status, StatusCode::kBudget, {"quota", "10485760", "10485761"});
  const AlignedBytes bytes(8192);
  expect_says(file->write((10 << 20) - 4096, bytes.span()), StatusCode::kBudget, {"quota"});
  must(file->write((10 << 20) - 8192, bytes.span()));
}

/// A file system of 1 MiB, where the system lets us mount one.
class SmallDisk : public testing::Test {
 protected:
  void SetUp() override {
    is_mounted_ = ::mount("tmpfs", directory_.path().c_str(), "tmpfs", 0, "size=1m") == 0;
    if (!is_mounted_) GTEST_SKIP() << "a small file system cannot be mounted here";
  }
  void TearDown() override {
    if (is_mounted_) {
      EXPECT_EQ(must(free_bytes(directory_.path())), 1 << 20);
      EXPECT_EQ(::umount2(directory_.path().c_str(), MNT_DETACH), 0);
    }
  }

  TempDirectory directory_;
  bool is_mounted_ = false;
};

TEST_F(SmallDisk, WhenFullTheErrorNamesTheFreeBytes) {
  const auto file = must(DataFile::open({.directory = directory_.path()}));
  must(file->reserve(256 << 10));  // the step of 64 MiB does not fit, the need does
  EXPECT_EQ(file->allocated_bytes(), 256 << 10);
  const Status status = file->reserve(4 << 20);
  EXPECT_EQ(status.error_number(), ENOSPC);
  const int64_t left = must(free_bytes(directory_.path()));
  expect_says(status, StatusCode::kStorage,
              {directory_.path(), "bytes are free", std::to_string(left)});
  EXPECT_EQ(file->allocated_bytes(), 256 << 10);
  const AlignedBytes bytes(64 << 10);
  must(file->write(0, bytes.span()));
}

TEST_F(SmallDisk, WhenFullOpeningIsAnErrorAndNoFallBack) {
  const auto hog = must(DataFile::open({.directory = directory_.path()}));
  must(hog->reserve(1 << 20));
  expect_says(open_status({.directory = directory_.path()}), StatusCode::kStorage,
              {"session file", directory_.path(), "0 bytes are free"});
}

TEST(DataFile, FileSizeLimitIsAnError) {
  const TempDirectory directory;
  const auto file = must(DataFile::open({.directory = directory.path()}));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{1 << 20, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = file->reserve(4 << 20);
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
  expect_says(status, StatusCode::kStorage, {directory.path(), "4194304", "ulimit -f"});
  must(file->reserve(4 << 20));
}

/// Runs `work` in a forked child that is killed while it waits.
template <typename Work>
void run_and_kill(Work work) {
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool good = work();
    (void)!::write(pipe_ends[1], good ? "y" : "n", 1);
    for (;;) ::pause();
  }
  ::close(pipe_ends[1]);
  char answer = 0;
  EXPECT_EQ(::read(pipe_ends[0], &answer, 1), 1);
  EXPECT_EQ(answer, 'y');
  ::close(pipe_ends[0]);
  ::kill(child, SIGKILL);
  int state = 0;
  ::waitpid(child, &state, 0);
  EXPECT_TRUE(WIFSIGNALED(state));
}

// On a disk of the test's own: others write to theirs meanwhile.
TEST_F(SmallDisk, HoldsNothingAfterKill) {
  const int64_t free_before = must(free_bytes(directory_.path()));
  run_and_kill([&] {
    auto file = DataFile::open({.directory = directory_.path(), .extend_bytes = 4096});
    if (!file.is_ok()) return false;
    const AlignedBytes bytes(64 << 10);
    if (!file.value()->write(0, bytes.span()).is_ok()) return false;
    (void)file.value().release();
    return must(free_bytes(directory_.path())) < free_before;
  });
  EXPECT_TRUE(directory_.is_empty());
  EXPECT_EQ(must(free_bytes(directory_.path())), free_before);
}

TEST(DataFile, NothingIsLeftAfterKill) {
  const TempDirectory directory;
  run_and_kill([&] {
    auto file = DataFile::open({.directory = directory.path()});
    if (!file.is_ok()) return false;
    const AlignedBytes bytes(1 << 20);
    if (!file.value()->write(0, bytes.span()).is_ok()) return false;
    (void)file.value().release();
    return true;
  });
  EXPECT_TRUE(directory.is_empty());
}

}  // namespace
}  // namespace kvswap
