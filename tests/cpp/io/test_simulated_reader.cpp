#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <tuple>

#include "io/readers.h"
#include "test_files.h"

namespace kvswap {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class SimulatedReader : public testing::Test {
 protected:
  void SetUp() override {
    fill_random(content_.span(), 51);
    file_ = file_with(directory_.path(), IoMode::kAuto, content_.span());
  }

  std::unique_ptr<BlockReader> open(const DeviceModel& model) {
    return make_modelled_reader(std::move(must(open_reader(*file_, {})).reader), model);
  }

  std::vector<BlockRead> reads(int count, int64_t length) {
    targets_.resize(static_cast<size_t>(count));
    std::vector<BlockRead> reads;
    for (int index = 0; index < count; ++index) {
      targets_[index] = {landing_.data() + index * length, static_cast<size_t>(length)};
      reads.push_back({index * length, {&targets_[index], 1}});
    }
    return reads;
  }

  TempDirectory directory_;
  AlignedBytes content_{1 << 20};
  AlignedBytes landing_{1 << 20};
  std::unique_ptr<DataFile> file_;
  std::vector<iovec> targets_;
};

// Only lower bounds are asserted: a busy machine may be later, and that is no mistake of the model.

TEST_F(SimulatedReader, OneReadTakesLatencyAndTransfer) {
  const auto reader = open({"slow", 5e-3, 1e6, 4});
  const auto start = Clock::now();
  const Ticket ticket = must(reader->submit(reads(1, 4096)));
  EXPECT_FALSE(reader->is_done(ticket));
  must(reader->wait(ticket));
  EXPECT_GE(seconds_since(start), 5e-3 + 4096e-6);
  EXPECT_EQ(std::memcmp(landing_.data(), content_.data(), 4096), 0);
}

TEST_F(SimulatedReader, ReadsInFlightShareTheBandwidth) {
  const auto reader = open({"narrow", 0, 4e6, 64});
  const auto start = Clock::now();
  must(reader->wait(must(reader->submit(reads(16, 8192)))));
  EXPECT_GE(seconds_since(start), 16 * 8192 / 4e6);
}

TEST_F(SimulatedReader, NoMoreThanItsDepthAtOnce) {
  const auto reader = open({"shallow", 4e-3, 1e12, 2});
  const auto start = Clock::now();
  must(reader->wait(must(reader->submit(reads(9, 4096)))));
  EXPECT_GE(seconds_since(start), 5 * 4e-3);
}

TEST_F(SimulatedReader, BatchesQueueBehindEachOther) {
  const auto reader = open({"narrow", 0, 1e6, 8});
  const auto start = Clock::now();
  const auto batch = reads(1, 8192);
  const Ticket first = must(reader->submit(batch));
  const Ticket second = must(reader->submit(batch));
  must(reader->wait(second));
  EXPECT_GE(seconds_since(start), 2 * 8192e-6);
  EXPECT_TRUE(reader->is_done(first));
  must(reader->wait(first));
}

TEST_F(SimulatedReader, BecomesDoneInItsTime) {
  const auto reader = open({"slow", 3e-3, 1e9, 1});
  const auto start = Clock::now();
  const Ticket ticket = must(reader->submit(reads(1, 4096)));
  while (!reader->is_done(ticket)) {
  }
  EXPECT_GE(seconds_since(start), 3e-3);
  must(reader->wait(ticket));
}

TEST_F(SimulatedReader, PassesErrorsOn) {
  const auto reader = open({"slow", 1e-3, 1e9, 1});
  iovec target{landing_.data(), 4096};
  const BlockRead past{1 << 20, {&target, 1}};
  EXPECT_FALSE(reader->wait(must(reader->submit({&past, 1}))).is_ok());
  EXPECT_FALSE(reader->wait(99).is_ok());
  EXPECT_FALSE(reader->submit({{BlockRead{-1, {&target, 1}}}}).is_ok());
}

TEST_F(SimulatedReader, KnowsTheDevicesByName) {
  for (const char* name : {"nvme", "ufs", "ufs3", "emmc"}) {
    const auto model = find_device_model(name);
    ASSERT_TRUE(model.has_value());
    EXPECT_EQ(model->name, name);
    // KVSwap, figure 2: reads of 512 bytes get less than 6 % of the bandwidth.
    EXPECT_LT(512 * model->depth / model->latency_seconds, 0.06 * model->bytes_per_second);
  }
  EXPECT_FALSE(find_device_model("floppy").has_value());
  EXPECT_EQ(open(*find_device_model("emmc"))->name().substr(0, 5), "emmc(");
}

}  // namespace
}  // namespace kvswap
