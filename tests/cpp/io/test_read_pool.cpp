// The threads that all thread readers of a disk share.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "io/readers.h"
#include "io/syscalls.h"
#include "test_files.h"

namespace kvswap {
namespace {

constexpr int64_t kBlock = 4096;
constexpr int kBlocks = 64;

int reading_threads() {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "comm");
    std::string name;
    std::getline(file, name);
    count += name.starts_with("kvswap-read");
  }
  return count;
}

/// A thread has its name a moment after it began, and a joined one is listed for a moment more.
bool are_soon(int count) {
  for (int turn = 0; turn < 2000 && reading_threads() != count; ++turn) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return reading_threads() == count;
}

class ReadPoolTest : public testing::Test {
 protected:
  void SetUp() override { fill_random(content_.span(), 3); }

  std::unique_ptr<BlockReader> open(const DataFile& file, int threads) {
    return must(open_reader(file, {.kind = ReaderKind::kThreads, .threads = threads})).reader;
  }

  /// Every block, in the order of the file, as one batch.
  struct Reads {
    Reads() {
      for (int i = 0; i < kBlocks; ++i) targets[i] = {landing.data() + i * kBlock, kBlock};
      for (int i = 0; i < kBlocks; ++i) reads.push_back({i * kBlock, {&targets[i], 1}});
    }
    bool are(const AlignedBytes& content) const {
      return std::memcmp(landing.data(), content.data(), kBlocks * kBlock) == 0;
    }
    AlignedBytes landing{kBlocks * kBlock};
    std::vector<iovec> targets = std::vector<iovec>(kBlocks);
    std::vector<BlockRead> reads;
  };

  TempDirectory directory_;
  AlignedBytes content_{kBlocks * kBlock};
};

TEST_F(ReadPoolTest, ReadersOfOneDiskTakeAsManyThreadsAsTheOneThatWantsMost) {
  const auto file = file_with(directory_.path(), IoMode::kAuto, content_.span());
  std::vector<std::unique_ptr<BlockReader>> readers;
  for (const int threads : {2, 4, 1, 4, 3}) readers.push_back(open(*file, threads));
  EXPECT_TRUE(are_soon(4));
  readers.push_back(open(*file, 6));
  EXPECT_TRUE(are_soon(6));
  std::vector<Reads> all(readers.size());
  for (int turn = 0; turn < 3; ++turn) {
    std::vector<Ticket> tickets;
    for (size_t i = 0; i < readers.size(); ++i) {
      tickets.push_back(must(readers[i]->submit(all[i].reads)));
    }
    for (size_t i = 0; i < readers.size(); ++i) {
      must(readers[i]->wait(tickets[i]));
      EXPECT_TRUE(all[i].are(content_)) << "reader " << i;
    }
  }
  readers.resize(2);
  EXPECT_EQ(reading_threads(), 6);
  readers.clear();
  EXPECT_TRUE(are_soon(0));
}

TEST_F(ReadPoolTest, ReadersComeAndGoUnderOneAnother) {
  const auto file = file_with(directory_.path(), IoMode::kAuto, content_.span());
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int index = 0; index < 4; ++index) {
    threads.emplace_back([&] {
      Reads all;
      for (int turn = 0; turn < 25; ++turn) {
        auto reader = open(*file, 3);
        const Ticket ticket = must(reader->submit(all.reads));
        // Now and then with reads in flight, whose memory must be whole until the end.
        if (turn % 3 == 0) continue;
        must(reader->wait(ticket));
        wrong += !all.are(content_);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

/// Reads of one file do not come back before they are let.
class HangingKernel final : public Syscalls {
 public:
  HangingKernel() { use_syscalls(this); }
  ~HangingKernel() override { use_syscalls(nullptr); }
  void hang(int fd) { hung_fd_ = fd; }
  void let() {
    hung_fd_ = -1;
    hung_fd_.notify_all();
  }
  int64_t preadv(int fd, const iovec* targets, int count, int64_t offset_bytes) override {
    hung_fd_.wait(fd);
    return Syscalls::preadv(fd, targets, count, offset_bytes);
  }

 private:
  std::atomic<int> hung_fd_ = -1;
};

TEST_F(ReadPoolTest, ADiskThatHangsHoldsUpItsOwnReadersAlone) {
  if (!std::filesystem::is_directory("/dev/shm")) GTEST_SKIP() << "there is no /dev/shm";
  const TempDirectory in_memory("/dev/shm");
  struct stat here{};
  struct stat there{};
  ASSERT_EQ(::stat(directory_.path().c_str(), &here), 0);
  ASSERT_EQ(::stat(in_memory.path().c_str(), &there), 0);
  if (here.st_dev == there.st_dev) GTEST_SKIP() << "TMPDIR and /dev/shm are one disk";
  HangingKernel kernel;
  const auto hung = file_with(directory_.path(), IoMode::kAuto, content_.span());
  const auto well = file_with(in_memory.path(), IoMode::kAuto, content_.span());
  const auto hung_reader = open(*hung, 2);
  const auto well_reader = open(*well, 2);
  Reads late;
  Reads timely;
  kernel.hang(hung->fd());
  const Ticket ticket = must(hung_reader->submit(late.reads));
  must(well_reader->wait(must(well_reader->submit(timely.reads))));
  EXPECT_TRUE(timely.are(content_));
  EXPECT_FALSE(hung_reader->is_done(ticket));
  kernel.let();
  must(hung_reader->wait(ticket));
  EXPECT_TRUE(late.are(content_));
}

}  // namespace
}  // namespace kvswap
