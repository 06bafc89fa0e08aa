#include <gtest/gtest.h>

#include <array>
#include <cerrno>

#include "io/read_progress.h"
#include "test_files.h"

namespace kvswap {
namespace {

using Next = ReadProgress::Next;

class ReadProgressTest : public testing::Test {
 protected:
  std::array<std::byte, 3000> memory_{};
  std::array<iovec, 3> targets_{iovec{memory_.data(), 1000}, iovec{memory_.data() + 1000, 500},
                                iovec{memory_.data() + 1500, 1500}};
  ReadProgress read_{4000, targets_};
};

TEST_F(ReadProgressTest, AllAtOnceIsDone) {
  const ReadProgress::Call call = read_.next_call(1 << 30);
  EXPECT_EQ(call.offset_bytes, 4000);
  EXPECT_EQ(call.targets_count, 3);
  EXPECT_EQ(read_.apply(3000, 1), Next::kDone);
}

TEST_F(ReadProgressTest, EveryShortReadGoesOnWhereItStopped) {
  for (int64_t first = 1; first < 3000; first += 7) {
    std::array<iovec, 3> targets = targets_;
    ReadProgress read(4000, targets);
    ASSERT_EQ(read.apply(first, 1), Next::kCallAgain);
    const ReadProgress::Call call = read.next_call(1 << 30);
    EXPECT_EQ(call.offset_bytes, 4000 + first);
    EXPECT_EQ(call.targets[0].iov_base, memory_.data() + first);
    EXPECT_EQ(read.apply(3000 - first, 1), Next::kDone);
  }
}

TEST_F(ReadProgressTest, CallsStayWithinTheirLimit) {
  for (int64_t limit = 1; limit < 3100; limit += 13) {
    std::array<iovec, 3> targets = targets_;
    ReadProgress read(0, targets);
    Next next = Next::kCallAgain;
    while (next == Next::kCallAgain) {
      const ReadProgress::Call call = read.next_call(limit);
      int64_t bytes = 0;
      for (int index = 0; index < call.targets_count; ++index) {
        bytes += static_cast<int64_t>(call.targets[index].iov_len);
      }
      ASSERT_GE(bytes, 1);
      ASSERT_LE(bytes, limit);
      next = read.apply(bytes, 1);
    }
    EXPECT_EQ(next, Next::kDone);
  }
}

TEST_F(ReadProgressTest, TransientErrorsAreTriedAgainButNotForEver) {
  for (const int error : {EINTR, EAGAIN}) {
    for (int time = 0; time < 100; ++time) EXPECT_EQ(read_.apply(-error, 1), Next::kCallAgain);
  }
  Next next = Next::kCallAgain;
  for (int time = 0; time < 100000 && next == Next::kCallAgain; ++time) {
    next = read_.apply(-EAGAIN, 1);
  }
  EXPECT_EQ(next, Next::kFailed);
}

TEST_F(ReadProgressTest, AnIoErrorIsTriedOnceMore) {
  EXPECT_EQ(read_.apply(-EIO, 1), Next::kCallAgain);
  EXPECT_EQ(read_.apply(1000, 1), Next::kCallAgain);
  EXPECT_EQ(read_.apply(-EIO, 1), Next::kFailed);
  const Status status = read_.failure("/some/where");
  EXPECT_EQ(status.code(), StatusCode::kStorage);
  EXPECT_EQ(status.error_number(), EIO);
  for (const char* part : {"/some/where", "5000", "2000 bytes", "errno 5", "kernel log"}) {
    EXPECT_TRUE(contains(status.message(), part)) << part << " in " << status.message();
  }
}

TEST_F(ReadProgressTest, OtherErrorsFailAtOnce) {
  EXPECT_EQ(read_.apply(-EBADF, 1), Next::kFailed);
  EXPECT_EQ(read_.failure("d").error_number(), EBADF);
}

TEST_F(ReadProgressTest, TheEndOfTheFileIsAFailure) {
  EXPECT_EQ(read_.apply(0, 1), Next::kFailed);
  EXPECT_TRUE(contains(read_.failure("d").message(), "truncated"));
}

TEST_F(ReadProgressTest, AnUnalignedCountUnderDirectIsTheEnd) {
  EXPECT_EQ(read_.apply(512, 512), Next::kCallAgain);
  EXPECT_EQ(read_.apply(100, 512), Next::kFailed);
  EXPECT_EQ(read_.failure("d").error_number(), ENODATA);
}

}  // namespace
}  // namespace kvswap
