#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "fault_injection.h"
#include "io/write_queue.h"
#include "memory_facts.h"
#include "test_files.h"

namespace kvswap {
namespace {

constexpr int64_t kBlock = 8192;

/// A file whose writes wait for permission, and which remembers their order.
class GatedFile final : public DataFile {
 public:
  explicit GatedFile(std::unique_ptr<DataFile> inner) : inner_(std::move(inner)) {}

  void allow(int writes) {
    {
      const std::lock_guard lock(mutex_);
      allowed_ += writes;
    }
    changed_.notify_all();
  }
  std::vector<int64_t> order() {
    const std::lock_guard lock(mutex_);
    return order_;
  }

  Status write(int64_t offset_bytes, std::span<const std::byte> bytes) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return allowed_ > 0; });
    --allowed_;
    order_.push_back(offset_bytes);
    return inner_->write(offset_bytes, bytes);
  }
  int fd() const override { return inner_->fd(); }
  bool is_direct() const override { return inner_->is_direct(); }
  int64_t alignment_bytes() const override { return inner_->alignment_bytes(); }
  const std::string& directory() const override { return inner_->directory(); }
  const std::vector<std::string>& fallbacks() const override { return inner_->fallbacks(); }
  Status reserve(int64_t size_bytes) override { return inner_->reserve(size_bytes); }
  int64_t allocated_bytes() const override { return inner_->allocated_bytes(); }
  void drop_cached(int64_t, int64_t) override {}
  Status shrink(int64_t) override { return Status::ok(); }
  void keep() override {}

 private:
  std::unique_ptr<DataFile> inner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int allowed_ = 0;
  std::vector<int64_t> order_;
};

class WriteQueueTest : public testing::Test {
 protected:
  uint64_t put(WriteQueue& queue, int64_t offset, int value) {
    WriteQueue::Buffer buffer = must(queue.acquire());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data) % 4096, 0u);
    std::memset(buffer.data, value, kBlock);
    return must(queue.submit(buffer, offset, kBlock));
  }

  /// Blocks 0, 1, ... of `first_value`, first_value + 1, ..., handed in before any can have failed;
  /// the number of the newest. `count` is at most the queue's buffers.
  uint64_t put_at_once(WriteQueue& queue, int count, int first_value) {
    std::vector<WriteQueue::Buffer> buffers;
    for (int index = 0; index < count; ++index) buffers.push_back(must(queue.acquire()));
    uint64_t number = 0;
    for (int index = 0; index < count; ++index) {
      std::memset(buffers[index].data, first_value + index, kBlock);
      number = must(queue.submit(buffers[index], index * kBlock, kBlock));
    }
    return number;
  }

  TempDirectory directory_;
  std::unique_ptr<DataFile> file_ = must(DataFile::open({.directory = directory_.path()}));
};

TEST_F(WriteQueueTest, StagingIsLeftOutOfCoreDumpsAndWipedWhenAsked) {
  if (KVSWAP_CPU_IS_EMULATED) GTEST_SKIP() << "qemu-user shows the emulator's own maps";
  for (const bool is_wiped : {false, true}) {
    auto queue = must(WriteQueue::create(
        file_.get(), {.buffer_bytes = kBlock, .buffers = 2, .is_wiped = is_wiped}));
    EXPECT_TRUE(is_left_out_of_dumps(queue->memory().data()));
    EXPECT_TRUE(is_left_out_of_dumps(&queue->memory().back()));
    must(queue->wait(put(*queue, 0, 0x5a)));
    put(*queue, kBlock, 0x5a);
    SecondLook look(queue->memory().data());
    SecondLook other(queue->memory().data() + kBlock);
    if (!look.works() || !other.works()) GTEST_SKIP() << "vmsplice is refused here";
    queue.reset();
    const auto zeros = std::vector<std::byte>(SecondLook::kBytes);
    const bool holds_zeros = look.bytes() == zeros && other.bytes() == zeros;
    EXPECT_EQ(holds_zeros, is_wiped);
  }
}

TEST_F(WriteQueueTest, WritesEverythingInItsPlace) {
  const auto queue = must(WriteQueue::create(file_.get(), {.buffer_bytes = kBlock, .buffers = 3}));
  for (int index = 0; index < 100; ++index) {
    EXPECT_EQ(put(*queue, index * kBlock, index), static_cast<uint64_t>(index + 1));
  }
  must(queue->wait(100));
  EXPECT_EQ(queue->written(), 100u);
  EXPECT_EQ(queue->bytes_written(), static_cast<uint64_t>(100 * kBlock));
  EXPECT_EQ(queue->resident_bytes(), 3 * kBlock);
  const AlignedBytes read(kBlock);
  for (int index = 0; index < 100; ++index) {
    ASSERT_EQ(::pread(file_->fd(), read.data(), kBlock, index * kBlock), kBlock);
    const AlignedBytes expected(kBlock);
    std::memset(expected.data(), index, kBlock);
    ASSERT_EQ(std::memcmp(read.data(), expected.data(), kBlock), 0);
  }
}

TEST_F(WriteQueueTest, KeepsTheOrderAndItsBound) {
  GatedFile gated(std::move(file_));
  const auto queue = must(WriteQueue::create(&gated, {.buffer_bytes = kBlock, .buffers = 2}));
  put(*queue, 5 * kBlock, 1);
  put(*queue, 2 * kBlock, 2);
  std::atomic<bool> acquired = false;
  std::thread producer([&] {
    put(*queue, 9 * kBlock, 3);
    acquired = true;
  });
  ::usleep(20000);
  EXPECT_FALSE(acquired);
  EXPECT_EQ(queue->written(), 0u);
  gated.allow(1);
  producer.join();
  must(queue->wait(1));
  EXPECT_GT(queue->blocked_seconds(), 0.0);
  gated.allow(2);
  must(queue->wait(3));
  EXPECT_EQ(gated.order(), (std::vector<int64_t>{5 * kBlock, 2 * kBlock, 9 * kBlock}));
}

TEST_F(WriteQueueTest, AnErrorStaysUntilItIsForgotten) {
  for (uint64_t bad = 1; bad <= 6; ++bad) {
    WriteFaults faults{.fail_write = bad, .lasts = true};
    FaultyDataFile faulty(must(DataFile::open({.directory = directory_.path()})), &faults);
    const auto queue = must(WriteQueue::create(&faulty, {.buffer_bytes = kBlock, .buffers = 3}));
    Status first;
    for (int index = 0; index < 6 && first.is_ok(); ++index) {
      Result<WriteQueue::Buffer> buffer = queue->acquire();
      if (!buffer.is_ok()) {
        first = buffer.status();
        break;
      }
      std::memset(buffer.value().data, index, kBlock);
      (void)must(queue->submit(buffer.value(), index * kBlock, kBlock));
    }
    if (first.is_ok()) first = queue->wait(6);
    EXPECT_EQ(first.error_number(), ENOSPC) << bad;
    EXPECT_EQ(queue->written(), bad - 1);
    EXPECT_FALSE(queue->acquire().is_ok());
    EXPECT_FALSE(queue->wait(bad).is_ok());
    queue->forget();
    faults.fail_write = 0;
    EXPECT_EQ(queue->written(), queue->written());
    const uint64_t next = put(*queue, 0, 0x77);
    must(queue->wait(next));
    EXPECT_EQ(queue->written(), next);
  }
}

TEST_F(WriteQueueTest, WhatFailedIsWrittenOnceTheDiskTakesIt) {
  WriteFaults faults{.fail_write = 2, .lasts = true};
  FaultyDataFile faulty(std::move(file_), &faults);
  const auto queue = must(WriteQueue::create(&faulty, {.buffer_bytes = kBlock, .buffers = 3}));
  put_at_once(*queue, 3, 0x30);
  EXPECT_EQ(queue->wait(3).error_number(), ENOSPC);
  EXPECT_EQ(queue->wait(3).error_number(), ENOSPC);
  faults.fail_write = 0;
  must(queue->wait(3));
  const AlignedBytes read(kBlock);
  for (int index = 0; index < 3; ++index) {
    ASSERT_EQ(::pread(faulty.fd(), read.data(), kBlock, index * kBlock), kBlock);
    EXPECT_EQ(static_cast<int>(read.data()[kBlock - 1]), 0x30 + index);
  }
}

TEST_F(WriteQueueTest, WhatIsYetToBeWrittenIsCounted) {
  WriteFaults faults{.fail_write = 1, .lasts = true};
  FaultyDataFile faulty(std::move(file_), &faults);
  const auto queue = must(WriteQueue::create(&faulty, {.buffer_bytes = kBlock, .buffers = 2}));
  const uint64_t first = put_at_once(*queue, 2, 1) - 1;
  EXPECT_EQ(queue->bytes_written(), static_cast<uint64_t>(2 * kBlock));
  EXPECT_FALSE(queue->wait(first).is_ok());
  EXPECT_EQ(queue->bytes_written(), static_cast<uint64_t>(2 * kBlock)) << "it may be tried again";
  queue->drop(first);
  EXPECT_EQ(queue->bytes_written(), static_cast<uint64_t>(kBlock));
}

TEST_F(WriteQueueTest, ATransientErrorIsTriedOnceMore) {
  for (const int error : {EIO, EAGAIN, EINTR}) {
    WriteFaults faults{.fail_write = 1, .error_number = error};
    FaultyDataFile faulty(must(DataFile::open({.directory = directory_.path()})), &faults);
    const auto queue = must(WriteQueue::create(&faulty, {.buffer_bytes = kBlock, .buffers = 1}));
    must(queue->wait(put(*queue, 0, 1)));
    EXPECT_EQ(faults.writes_seen, 2u);
  }
}

TEST_F(WriteQueueTest, AWriteThatNobodyReadsIsDropped) {
  WriteFaults faults{.fail_write = 1, .lasts = true};
  FaultyDataFile faulty(std::move(file_), &faults);
  const auto queue = must(WriteQueue::create(&faulty, {.buffer_bytes = kBlock, .buffers = 2}));
  const uint64_t second = put_at_once(*queue, 2, 1);
  EXPECT_FALSE(queue->wait(second).is_ok());
  queue->drop(second - 1);
  faults.fail_write = 0;
  must(queue->wait(second));
  EXPECT_EQ(queue->bytes_written(), static_cast<uint64_t>(kBlock));
  must(queue->wait(put(*queue, 0, 3)));
}

TEST_F(WriteQueueTest, AnErrorFreesAProducerThatWaits) {
  WriteFaults faults{.fail_write = 1, .lasts = true};
  FaultyDataFile faulty(std::move(file_), &faults);
  const auto queue = must(WriteQueue::create(&faulty, {.buffer_bytes = kBlock, .buffers = 1}));
  put(*queue, 0, 1);
  EXPECT_FALSE(queue->acquire().is_ok());
}

TEST_F(WriteQueueTest, AWaitEndsWhenItIsAskedToAndWhenItTakesTooLong) {
  GatedFile gated(std::move(file_));
  std::vector<std::string> log;
  WaitPolicy patience(1.2);
  set_log([&](const std::string& line) { log.push_back(line); });
  const auto queue = must(
      WriteQueue::create(&gated, {.buffer_bytes = kBlock, .buffers = 1, .patience = &patience}));
  const uint64_t number = put(*queue, 3 * kBlock, 1);
  const Status late = queue->wait(number);
  EXPECT_EQ(late.code(), StatusCode::kLate);
  EXPECT_EQ(late.error_number(), ETIMEDOUT);
  EXPECT_TRUE(contains(late.message(), "offset " + std::to_string(3 * kBlock)));
  EXPECT_EQ(log.size(), 1u) << "logged once";
  patience.stop();
  EXPECT_EQ(queue->acquire().status().code(), StatusCode::kInterrupted);
  patience.wait_for_all();
  gated.allow(1);
  must(queue->wait(number));
  set_log(nullptr);
}

TEST_F(WriteQueueTest, GivingBackMakesRoom) {
  const auto queue = must(WriteQueue::create(file_.get(), {.buffer_bytes = kBlock, .buffers = 1}));
  for (int index = 0; index < 5; ++index) queue->give_back(must(queue->acquire()));
  put(*queue, 0, 1);
}

TEST_F(WriteQueueTest, ClosingDropsWhatNobodyWillRead) {
  GatedFile gated(std::move(file_));
  auto queue = must(WriteQueue::create(&gated, {.buffer_bytes = kBlock, .buffers = 4}));
  for (int index = 0; index < 4; ++index) put(*queue, index * kBlock, 0x40 + index);
  gated.allow(1);
  must(queue->wait(1));
  std::thread closing([&] { queue.reset(); });
  ::usleep(20000);
  gated.allow(1);
  closing.join();
  EXPECT_LE(gated.order().size(), 2u);
}

TEST_F(WriteQueueTest, RefusesWhatItCannotWrite) {
  const auto queue = must(WriteQueue::create(file_.get(), {.buffer_bytes = kBlock, .buffers = 1}));
  const std::pair<int64_t, int64_t> wrong[] = {
      {-kBlock, kBlock}, {100, kBlock}, {0, 100}, {0, 0}, {0, 2 * kBlock}};
  for (const auto& [offset, length] : wrong) {
    const Result<uint64_t> number = queue->submit(must(queue->acquire()), offset, length);
    ASSERT_FALSE(number.is_ok());
    EXPECT_EQ(number.status().code(), StatusCode::kInvalid);
  }
  EXPECT_EQ(queue->wait(1).code(), StatusCode::kInvalid);
  must(queue->wait(0));
  for (const WriteQueueOptions& options :
       {WriteQueueOptions{.buffers = 0}, WriteQueueOptions{.buffer_bytes = 100},
        WriteQueueOptions{.buffer_bytes = 0}}) {
    EXPECT_FALSE(WriteQueue::create(file_.get(), options).is_ok());
  }
}

TEST_F(WriteQueueTest, OverTheQuotaIsABudgetError) {
  file_ = must(DataFile::open({.directory = directory_.path(), .quota_bytes = 2 * kBlock}));
  const auto queue = must(WriteQueue::create(file_.get(), {.buffer_bytes = kBlock, .buffers = 1}));
  put(*queue, 0, 1);
  put(*queue, kBlock, 2);
  put(*queue, 2 * kBlock, 3);
  EXPECT_EQ(queue->wait(3).code(), StatusCode::kBudget);
  EXPECT_EQ(queue->written(), 2u);
}

}  // namespace
}  // namespace kvswap
