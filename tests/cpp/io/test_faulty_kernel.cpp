// Errors of single system calls, under every reader and the file: exact bytes or one clear error.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>

#include "faulty_kernel.h"
#include "io/anonymous_file.h"
#include "io/host_info.h"
#include "io/readers.h"
#include "io/write_queue.h"
#include "test_files.h"

namespace kvswap {
namespace {

constexpr int64_t kBlock = 16384;
constexpr int kBlocks = 40;

class FaultyReads : public testing::TestWithParam<ReaderKind> {
 protected:
  void SetUp() override {
    if (GetParam() == ReaderKind::kUring && !read_host_info().has_uring) {
      GTEST_SKIP() << read_host_info().uring_problem;
    }
    fill_random(content_.span(), 7);
    file_ = file_with(directory_.path(), IoMode::kAuto, content_.span());
    open();
  }
  void open() {
    reader_.reset();
    reader_ = must(open_reader(*file_, {.kind = GetParam(), .depth = 16})).reader;
  }
  /// Reads every block, and compares when the Status is ok.
  Status read_all() {
    AlignedBytes landing(kBlocks * kBlock);
    std::vector<iovec> targets(kBlocks);
    std::vector<BlockRead> reads(kBlocks);
    for (int i = 0; i < kBlocks; ++i) {
      targets[i] = {landing.data() + i * kBlock, kBlock};
      reads[i] = {i * kBlock, {&targets[i], 1}};
    }
    auto ticket = reader_->submit(reads);
    if (!ticket.is_ok()) return ticket.status();
    KVSWAP_RETURN_IF_ERROR(reader_->wait(ticket.value()));
    EXPECT_EQ(std::memcmp(landing.data(), content_.data(), kBlocks * kBlock), 0);
    return Status::ok();
  }

  TempDirectory directory_;
  AlignedBytes content_ = AlignedBytes(kBlocks * kBlock);
  FaultyKernel kernel_;
  std::unique_ptr<DataFile> file_;
  std::unique_ptr<BlockReader> reader_;
};

TEST_P(FaultyReads, OneBadCallIsReadAgainOrTold) {
  for (const int error : {EIO, EAGAIN, EINTR, ENOMEM, ENODEV, ETIMEDOUT}) {
    for (const uint64_t nth : {1, 2, 17, 40}) {
      kernel_.arm({.call = KernelCall::kRead, .nth = nth, .error_number = error});
      const Status status = read_all();
      const bool is_retried = error == EIO || error == EAGAIN || error == EINTR;
      EXPECT_EQ(status.is_ok(), is_retried) << error << " " << status.message();
      if (!status.is_ok()) {
        EXPECT_EQ(status.error_number(), error);
        EXPECT_EQ(status.path(), directory_.path());
      }
      EXPECT_EQ(kernel_.injected(), 1u);
      kernel_.heal();
      must(read_all());
    }
  }
}

TEST_P(FaultyReads, AnErrorThatStaysIsToldAndTheNextReadIsRight) {
  for (const int error : {EIO, EAGAIN, ENODEV}) {
    kernel_.arm({.call = KernelCall::kRead, .is_lasting = true, .error_number = error});
    EXPECT_EQ(read_all().error_number(), error);
    kernel_.heal();
    must(read_all());
  }
}

TEST_P(FaultyReads, ShortLateAndReorderedReadsAreWhole) {
  kernel_.arm({.call = KernelCall::kRead, .is_lasting = true, .is_short = true});
  must(read_all());
  kernel_.arm({.call = KernelCall::kRead, .is_lasting = true, .delay_us = 500});
  must(read_all());
  kernel_.arm({.call = KernelCall::kRead, .is_lasting = true, .reorders = true});
  must(read_all());
  EXPECT_GT(kernel_.injected(), 0u);
}

TEST_P(FaultyReads, ARingThatFailsIsLeft) {
  if (GetParam() != ReaderKind::kUring) return;
  std::vector<std::string> log;
  set_log([&](const std::string& line) { log.push_back(line); });
  for (const uint64_t nth : {1, 2, 3, 5}) {
    open();
    kernel_.arm(
        {.call = KernelCall::kRingSubmit, .nth = nth, .is_lasting = true, .error_number = EPERM});
    must(read_all());
    must(read_all());
    kernel_.heal();
  }
  EXPECT_EQ(log.size(), 4u);
  EXPECT_TRUE(contains(log.front(), "io_uring_enter"));
  // Short of memory for a moment only.
  open();
  kernel_.arm({.call = KernelCall::kRingSubmit, .nth = 1, .error_number = EAGAIN});
  must(read_all());
  EXPECT_EQ(log.size(), 4u);
  set_log(nullptr);
}

TEST_P(FaultyReads, AWaitThatTakesTooLongIsGivenUpAndTakenUpAgain) {
  if (GetParam() == ReaderKind::kSync) return;
  WaitPolicy patience(0.2);
  reader_ =
      must(open_reader(*file_, {.kind = GetParam(), .depth = 16, .patience = &patience})).reader;
  kernel_.arm({.call = KernelCall::kRead, .nth = 5, .delay_us = 700000});
  AlignedBytes landing(kBlocks * kBlock);
  const iovec target = {landing.data(), kBlock};
  std::vector<BlockRead> reads;
  for (int i = 0; i < 8; ++i) reads.push_back({0, {&target, 1}});
  const Ticket ticket = must(reader_->submit(reads));
  const Status late = reader_->wait(ticket);
  EXPECT_EQ(late.code(), StatusCode::kLate) << late.message();
  EXPECT_TRUE(contains(late.message(), directory_.path()));
  Status again = late;
  for (int turn = 0; turn < 20 && again.is_pending(); ++turn) again = reader_->wait(ticket);
  must(again);
  EXPECT_EQ(std::memcmp(landing.data(), content_.data(), kBlock), 0);
}

INSTANTIATE_TEST_SUITE_P(Readers, FaultyReads,
                         testing::Values(ReaderKind::kUring, ReaderKind::kThreads,
                                         ReaderKind::kSync));

/// Not enough locked memory for the first rings that are asked for.
class SetupsRefused final : public Syscalls {
 public:
  explicit SetupsRefused(int count) : left_(count) { use_syscalls(this); }
  int ring_setup(unsigned entries, io_uring* ring, unsigned flags) override {
    return left_-- > 0 ? -ENOMEM : Syscalls::ring_setup(entries, ring, flags);
  }

 private:
  int left_;
};

TEST(FaultyLadder, EveryRungIsReached) {
  const TempDirectory directory;
  const auto file = must(DataFile::open({.directory = directory.path()}));
  for (const std::string rung : {"uring", "uring64", "uring16", "threads", "sync"}) {
    const bool is_ring = rung.starts_with("uring");
    if (is_ring && !read_host_info().has_uring) continue;
    ::setenv("KVSWAP_IO", rung.c_str(), 1);
    const OpenedReader opened = must(open_reader(*file, {.depth = 256}));
    EXPECT_EQ(opened.reader->name(), is_ring ? "uring" : rung);
    EXPECT_EQ(opened.reason, "");
  }
  ::setenv("KVSWAP_IO", "floppy", 1);
  EXPECT_EQ(open_reader(*file, {}).status().code(), StatusCode::kInvalid);
  ::unsetenv("KVSWAP_IO");

  FaultyKernel kernel;
  kernel.arm({.call = KernelCall::kRingSetup, .is_lasting = true, .error_number = EPERM});
  OpenedReader opened = must(open_reader(*file, {}));
  EXPECT_EQ(opened.reader->name(), "threads");
  EXPECT_TRUE(contains(opened.reason, "kernel.io_uring_disabled")) << opened.reason;
  kernel.arm({.call = KernelCall::kRingSetup, .is_lasting = true, .error_number = ENOMEM});
  opened = must(open_reader(*file, {.depth = 256}));
  EXPECT_EQ(opened.reader->name(), "threads");
  EXPECT_TRUE(contains(opened.reason, "ulimit -l")) << opened.reason;
  kernel.arm({.call = KernelCall::kRingSetup, .is_lasting = true, .error_number = EMFILE});
  opened = must(open_reader(*file, {}));
  EXPECT_EQ(opened.reader->name(), "threads");
  EXPECT_TRUE(contains(opened.reason, "ulimit -n")) << opened.reason;
  kernel.heal();
  if (!read_host_info().has_uring) return;
  // 256 is refused, and 64 too.
  SetupsRefused refusing(2);
  opened = must(open_reader(*file, {.depth = 256}));
  EXPECT_EQ(opened.reader->name(), "uring");
  EXPECT_TRUE(contains(opened.reason, "16 reads")) << opened.reason;
  use_syscalls(&kernel);
  // 256 is refused, 64 is granted.
  kernel.arm({.call = KernelCall::kRingSetup, .nth = 1, .error_number = ENOMEM});
  opened = must(open_reader(*file, {.depth = 256}));
  EXPECT_EQ(opened.reader->name(), "uring");
  EXPECT_TRUE(contains(opened.reason, "64 reads")) << opened.reason;
}

TEST(FaultyFile, OpensAndWritesThroughWhatCanBeHealed) {
  const TempDirectory directory;
  FaultyKernel kernel;
  // No O_TMPFILE: a name for a moment, and nothing of it is left.
  kernel.arm({.call = KernelCall::kOpen, .error_number = EOPNOTSUPP});
  auto file = must(DataFile::open({.directory = directory.path()}));
  EXPECT_TRUE(directory.is_empty());
  AlignedBytes bytes(8 * kBlock);
  fill_random(bytes.span(), 3);
  kernel.arm({.call = KernelCall::kWrite, .is_lasting = true, .is_short = true});
  must(file->write(0, bytes.span()));
  AlignedBytes read(8 * kBlock);
  ASSERT_EQ(::pread(file->fd(), read.data(), read.size(), 0), static_cast<ssize_t>(read.size()));
  EXPECT_EQ(std::memcmp(read.data(), bytes.data(), read.size()), 0);
  for (const int error : {EINTR, EAGAIN}) {
    kernel.arm({.call = KernelCall::kWrite, .error_number = error});
    must(file->write(0, bytes.span()));
    kernel.arm({.call = KernelCall::kWrite, .is_lasting = true, .error_number = error});
    EXPECT_EQ(file->write(0, bytes.span()).error_number(), error) << "and not for ever";
  }
  kernel.arm({.call = KernelCall::kAllocate, .is_lasting = true, .error_number = ENOSPC});
  const Status full = file->reserve(int64_t{1} << 30);
  EXPECT_EQ(full.error_number(), ENOSPC);
  EXPECT_EQ(full.path(), directory.path());
}

TEST(FaultyFile, ANameThatAKilledProcessLeftIsSweptUnlessItIsInUse) {
  const TempDirectory directory;
  const std::string left = directory.path() + "/.kvswap-abcdef";
  const std::string other = directory.path() + "/.kvswap-notours";
  for (const std::string& path : {left, other}) ::close(::creat(path.c_str(), 0600));
  FaultyKernel kernel;
  kernel.arm({.call = KernelCall::kOpen, .error_number = EOPNOTSUPP});
  const auto file = must(DataFile::open({.directory = directory.path()}));
  EXPECT_NE(::access(left.c_str(), F_OK), 0);
  EXPECT_EQ(::access(other.c_str(), F_OK), 0);
}

TEST(FaultyFile, SpaceIsFreeWhenTheFileIsClosed) {
  for (const ReaderKind kind : {ReaderKind::kAuto, ReaderKind::kThreads, ReaderKind::kSync}) {
    const TempDirectory directory;
    auto file = must(DataFile::open({.directory = directory.path()}));
    auto reader = must(open_reader(*file, {.kind = kind})).reader;
    AlignedBytes bytes(8 << 20);
    must(file->write(0, bytes.span()));
    const iovec target = {bytes.data(), 4096};
    const BlockRead read = {0, {&target, 1}};
    must(reader->wait(must(reader->submit({&read, 1}))));
    const OwnedFd held(::dup(file->fd()));  // as the kernel holds it, for a moment
    const auto blocks = [&] {
      struct stat facts{};
      EXPECT_EQ(::fstat(held.get(), &facts), 0);
      return facts.st_blocks;
    };
    EXPECT_GE(blocks(), (8 << 20) / 512);
    reader.reset();
    file.reset();
    EXPECT_EQ(blocks(), 0);
  }
}

TEST(FaultyFile, AFileSizeLimitIsAnErrorAndNoSignal) {
  const TempDirectory directory;
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_DFL);
    const rlimit limit = {1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    auto file = DataFile::open({.directory = directory.path()});
    if (!file.is_ok()) ::_exit(2);
    AlignedBytes bytes(2 << 20);
    if (file.value()->reserve(8 << 20).error_number() != EFBIG) ::_exit(3);
    if (file.value()->write(0, bytes.span()).error_number() != EFBIG) ::_exit(4);
    ::_exit(file.value()->write(0, bytes.span().first(65536)).is_ok() ? 0 : 5);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(FaultyFile, AFolderThatKeepsNoSecretIsTold) {
  const TempDirectory in_memory("/dev/shm");
  EXPECT_TRUE(
      contains(must(DataFile::open({.directory = in_memory.path()}))->fallbacks().at(0), "memory"));
  const TempDirectory open_to_all;
  ASSERT_EQ(::chmod(open_to_all.path().c_str(), 0777), 0);
  bool is_told = false;
  const auto file = must(DataFile::open({.directory = open_to_all.path()}));
  for (const std::string& sentence : file->fallbacks()) is_told |= contains(sentence, "sticky");
  EXPECT_TRUE(is_told);
  const std::string with_nul = open_to_all.path() + std::string("\0x", 2);
  EXPECT_EQ(DataFile::open({.directory = with_nul}).status().code(), StatusCode::kInvalid);
}

}  // namespace
}  // namespace kvswap
