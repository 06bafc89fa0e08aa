// The device that is no device: order comes from streams and events alone, and both are seen.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "device/host_device.h"
#include "device/upload_ring.h"

namespace kvswap {
namespace {

std::unique_ptr<Device> open_device(int64_t delay_us_max = 200) {
  auto device = host_device({.delay_us_max = delay_us_max}).make();
  EXPECT_TRUE(device.is_ok());
  return std::move(device.value());
}

DeviceBytes allocate(Device& device, int64_t bytes) {
  auto memory = DeviceBytes::allocate(device, bytes);
  EXPECT_TRUE(memory.is_ok());
  return std::move(memory.value());
}

TEST(HostDevice, MemoryIsZeroedAlignedAndCounted) {
  const auto device = open_device();
  {
    const DeviceBytes memory = allocate(*device, 5000);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 256, 0u);
    EXPECT_TRUE(std::all_of(memory.data(), memory.data() + 5000,
                            [](std::byte each) { return each == std::byte{0}; }));
    EXPECT_EQ(device->allocated_bytes(), 5000);
  }
  EXPECT_EQ(device->allocated_bytes(), 0);
  std::vector<std::byte> host(100);
  ASSERT_TRUE(device->pin(host.data(), 100).is_ok());
  EXPECT_EQ(device->pinned_bytes(), 100);
  device->unpin(host.data(), 100);
  EXPECT_EQ(device->pinned_bytes(), 0);
}

TEST(HostDevice, AStreamKeepsItsOrderAndEventsTieStreams) {
  const auto device = open_device();
  const DeviceBytes memory = allocate(*device, 1 << 16);
  const Event written = device->make_event().value();
  const Event read = device->make_event().value();
  std::vector<std::byte> in(1 << 16);
  std::vector<std::byte> out(1 << 16);
  ASSERT_TRUE(device->synchronize(written).is_ok()) << "never recorded: at once";
  for (int round = 1; round <= 50; ++round) {
    std::fill(in.begin(), in.end(), static_cast<std::byte>(round));
    {
      const Device::On load(*device, Stream::kLoad);
      device->wait(read);  // of the round before
      device->copy_in(memory.data(), in.data(), 1 << 16);
      device->record(written);
    }
    device->wait(written);
    device->copy_out(out.data(), memory.data(), 1 << 16);
    device->record(read);
    ASSERT_TRUE(device->synchronize(read).is_ok());
    ASSERT_EQ(out, in) << round;
  }
  EXPECT_GE(device->seconds_between(written, read), 0.0);
  EXPECT_EQ(device->stream(), Stream::kCompute);
}

TEST(HostDevice, DrainWaitsForEveryStream) {
  const auto device = open_device();
  const DeviceBytes memory = allocate(*device, kStreams * sizeof(int32_t));
  for (int32_t round = 1; round <= 50; ++round) {
    std::vector<int32_t> host(kStreams, -1);
    for (int stream = 0; stream < kStreams; ++stream) {
      const Device::On on(*device, static_cast<Stream>(stream));
      std::byte* place = memory.data() + stream * sizeof(int32_t);
      device->copy_in(place, &round, sizeof(round));
      device->copy_out(&host[stream], place, sizeof(round));
    }
    ASSERT_TRUE(device->drain().is_ok());
    ASSERT_EQ(host, std::vector<int32_t>(kStreams, round));
  }
}

TEST(UploadRing, KeepsATableUntilItsKernelHasRun) {
  const auto device = open_device(300);
  constexpr int64_t kSegment = 4 * UploadRing::kAlignment;
  std::vector<std::byte> host(UploadRing::kSegments * kSegment);
  const auto ring = std::move(UploadRing::create(*device, host.data(), kSegment).value());
  constexpr int kRounds = 300;
  std::vector<int32_t> seen(kRounds * 8);
  for (int32_t round = 0; round < kRounds; ++round) {
    const Device::On on(*device, static_cast<Stream>(round % kStreams));
    std::vector<int32_t> table(8);
    std::iota(table.begin(), table.end(), 8 * round);
    // Its size changes, so that segments are left at different fill.
    auto tables = ring->open((1 + round % 3) * UploadRing::kAlignment);
    const int32_t* on_device = tables.add(table);
    tables.send();
    device->copy_out(seen.data() + 8 * round, on_device, 8 * sizeof(int32_t));
  }
  ASSERT_TRUE(device->drain().is_ok());
  for (int32_t i = 0; i < kRounds * 8; ++i) ASSERT_EQ(seen[i], i);
}

/// Does nothing but remember which stream's event the host waits for.
class WaitsOnly final : public Device {
 public:
  std::string name() const override { return "none"; }
  Result<std::byte*> allocate(int64_t bytes) override {
    memory_.resize(bytes);
    return memory_.data();
  }
  void free(std::byte*, int64_t) override {}
  Status pin(std::byte*, int64_t) override { return Status::ok(); }
  void unpin(std::byte*, int64_t) override {}
  Result<Event> make_event() override {
    recorded_.emplace_back();
    return static_cast<Event>(recorded_.size() - 1);
  }
  void record(Event event) override { recorded_[event] = stream(); }
  void wait(Event) override {}
  Status synchronize(Event event) override {
    EXPECT_TRUE(recorded_[event].has_value()) << "never recorded";
    waited_for.push_back(*recorded_[event]);
    return Status::ok();
  }
  double seconds_between(Event, Event) override { return 0; }
  Status drain() override { return Status::ok(); }
  Status hand_back() override { return Status::ok(); }
  void set_compute_stream(void*) override {}
  void copy_in(void*, const void*, int64_t) override {}
  void copy_out(void*, const void*, int64_t) override {}
  void copy(void*, const void*, int64_t) override {}
  void launch(const KernelLaunch&) override {}

  std::vector<Stream> waited_for;

 private:
  std::vector<std::byte> memory_;
  std::vector<std::optional<Stream>> recorded_;
};

TEST(UploadRing, WaitsForNoStreamButThoseOfItsTables) {
  WaitsOnly device;
  std::vector<std::byte> host(UploadRing::kSegments * UploadRing::kAlignment);
  const auto ring =
      std::move(UploadRing::create(device, host.data(), UploadRing::kAlignment).value());
  const std::vector<int32_t> table(8);
  const auto send = [&](Stream stream, int times) {
    const Device::On on(device, stream);
    for (int i = 0; i < times; ++i) {
      auto tables = ring->open(UploadRing::kAlignment);  // a segment
      tables.add(table);
      tables.send();
    }
  };
  send(Stream::kCompute, 1);
  send(Stream::kWrite, UploadRing::kSegments - 1);
  EXPECT_TRUE(device.waited_for.empty());
  send(Stream::kWrite, 1);
  EXPECT_EQ(device.waited_for, std::vector<Stream>{Stream::kCompute}) << "where its table was";
  device.waited_for.clear();
  send(Stream::kWrite, 3 * UploadRing::kSegments);
  EXPECT_EQ(device.waited_for, std::vector<Stream>(3 * UploadRing::kSegments, Stream::kWrite));
}

TEST(TableRingDeathTest, ATableLargerThanASegmentIsOurMistake) {
  const auto device = open_device(0);
  std::vector<std::byte> host(UploadRing::kSegments * UploadRing::kAlignment);
  const auto ring =
      std::move(UploadRing::create(*device, host.data(), UploadRing::kAlignment).value());
  EXPECT_DEATH(ring->open(UploadRing::kAlignment + 1), "does not hold");
}

}  // namespace
}  // namespace kvswap
