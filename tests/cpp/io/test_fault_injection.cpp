#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>

#include "fault_injection.h"
#include "io/readers.h"
#include "test_files.h"

namespace kvswap {
namespace {

class FaultInjection : public testing::Test {
 protected:
  void SetUp() override {
    fill_random(content_.span(), 61);
    file_ = file_with(directory_.path(), IoMode::kAuto, content_.span());
    reader_ =
        std::make_unique<FaultyReader>(std::move(must(open_reader(*file_, {})).reader), &faults_);
    for (int index = 0; index < 4; ++index) {
      targets_.push_back({landing_.data() + 4096 * index, 4096});
    }
    for (int index = 0; index < 4; ++index) reads_.push_back({4096 * index, {&targets_[index], 1}});
  }

  bool is_right(int index) const {
    return std::memcmp(landing_.data() + 4096 * index, content_.data() + 4096 * index, 4096) == 0;
  }

  TempDirectory directory_;
  AlignedBytes content_{16 * 4096};
  AlignedBytes landing_{4 * 4096};
  std::unique_ptr<DataFile> file_;
  ReadFaults faults_;
  std::unique_ptr<BlockReader> reader_;
  std::vector<iovec> targets_;
  std::vector<BlockRead> reads_;
};

TEST_F(FaultInjection, FailsTheReadItWasAskedToFail) {
  for (uint64_t bad = 1; bad <= 12; ++bad) {
    faults_ = {.fail_read = bad};
    for (uint64_t batch = 0; batch < 3; ++batch) {
      const Status status = reader_->wait(must(reader_->submit(reads_)));
      EXPECT_EQ(status.is_ok(), (bad - 1) / 4 != batch);
    }
  }
}

TEST_F(FaultInjection, RefusesTheSubmit) {
  faults_ = {.fail_submit = 2};
  must(reader_->wait(must(reader_->submit(reads_))));
  EXPECT_FALSE(reader_->submit(reads_).is_ok());
  must(reader_->wait(must(reader_->submit(reads_))));
}

TEST_F(FaultInjection, DeliversWrongBytesInSilence) {
  faults_ = {.flip_read = 2, .misdirect_read = 3, .misdirect_bytes = 4096};
  must(reader_->wait(must(reader_->submit(reads_))));
  EXPECT_TRUE(is_right(0) && is_right(3));
  EXPECT_FALSE(is_right(1) || is_right(2));
}

TEST_F(FaultInjection, TearsAndFlipsWrites) {
  WriteFaults faults{.tear_write = 1, .flip_write = 2};
  FaultyDataFile file(std::move(file_), &faults);
  AlignedBytes fresh(8192);
  EXPECT_FALSE(file.write(0, fresh.span()).is_ok());
  const AlignedBytes copy(8192);
  std::memcpy(copy.data(), fresh.data(), 8192);
  must(file.write(8192, fresh.span()));
  EXPECT_EQ(std::memcmp(copy.data(), fresh.data(), 8192), 0);
  const AlignedBytes read(16384);
  ASSERT_EQ(::pread(file.fd(), read.data(), 16384, 0), 16384);
  EXPECT_EQ(std::memcmp(read.data(), fresh.data(), 4096), 0);
  EXPECT_EQ(std::memcmp(read.data() + 4096, content_.data() + 4096, 4096), 0);
  EXPECT_EQ(std::memcmp(read.data() + 8192, fresh.data(), 8191), 0);
  EXPECT_NE(read.data()[16383], fresh.data()[8191]);
  file_.reset();
}

}  // namespace
}  // namespace kvswap
