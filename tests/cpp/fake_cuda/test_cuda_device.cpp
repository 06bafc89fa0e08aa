// CudaDevice alone: order, memory, and what it makes of a runtime that fails.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device/cuda/cuda_device.h"
#include "fake_cuda/runtime/fake_cuda.h"

namespace kvswap {
namespace {

using fake_cuda::Machine;
constexpr int64_t kBytes = 4096;
using Bytes = std::vector<std::byte>;

Bytes bytes_of(int number) { return Bytes(kBytes, static_cast<std::byte>(number)); }

std::unique_ptr<Device> open_device(int index = 0, std::function<void()> make_room = {}) {
  auto device = cuda_device(index, std::move(make_room)).make();
  EXPECT_TRUE(device.is_ok()) << device.status().message();
  return device.is_ok() ? std::move(device.value()) : nullptr;
}

/// Nothing of the device's is left, and no error that torch would find.
void expect_nothing_left() {
  EXPECT_EQ(fake_cuda::left(), fake_cuda::Left());
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(CudaDevice, MemoryIsZeroForEveryStream) {
  const Machine machine;
  {
    const auto device = open_device();
    for (int round = 0; round < 10; ++round) {
      const DeviceBytes memory = std::move(DeviceBytes::allocate(*device, kBytes).value());
      for (int stream = 0; stream < kStreams; ++stream) {
        const Device::On on(*device, static_cast<Stream>(stream));
        Bytes seen = bytes_of(1);
        device->copy_out(seen.data(), memory.data(), kBytes);
        EXPECT_EQ(seen, bytes_of(0)) << stream;
      }
      EXPECT_EQ(device->allocated_bytes(), kBytes);
    }
    EXPECT_EQ(device->allocated_bytes(), 0);
  }
  expect_nothing_left();
}

TEST(CudaDevice, WhatIsQueuedMayUseMemoryThatIsFreed) {
  const Machine machine({.delay_us_max = 1000});
  {
    const auto device = open_device();
    Bytes seen[kStreams];
    for (int stream = 0; stream < kStreams; ++stream) {
      seen[stream] = bytes_of(1);
      ASSERT_TRUE(device->pin(seen[stream].data(), kBytes).is_ok());
      DeviceBytes memory = std::move(DeviceBytes::allocate(*device, kBytes).value());
      const Device::On on(*device, static_cast<Stream>(stream));
      for (int copies = 0; copies < 20; ++copies) {
        device->copy(memory.data() + kBytes / 2, memory.data(), kBytes / 2);
      }
      device->copy_out(seen[stream].data(), memory.data(), kBytes);
    }
    for (Bytes& each : seen) {
      device->unpin(each.data(), kBytes);
      EXPECT_EQ(each, bytes_of(0));
    }
  }
  expect_nothing_left();
}

TEST(CudaDevice, UnpinningWaitsForCopies) {
  const Machine machine({.delay_us_max = 1000});
  {
    const auto device = open_device();
    const DeviceBytes memory = std::move(DeviceBytes::allocate(*device, kBytes).value());
    for (int stream = 0; stream < kStreams; ++stream) {
      Bytes source = bytes_of(3), target = bytes_of(4);
      for (Bytes* each : {&source, &target}) {
        ASSERT_TRUE(device->pin(each->data(), kBytes).is_ok());
      }
      const Device::On on(*device, static_cast<Stream>(stream));
      device->copy_in(memory.data(), source.data(), kBytes);
      device->copy_out(target.data(), memory.data(), kBytes);
      for (Bytes* each : {&source, &target}) device->unpin(each->data(), kBytes);
      EXPECT_EQ(target, source);
    }
    EXPECT_EQ(device->pinned_bytes(), 0);
    EXPECT_TRUE(device->drain().is_ok());
  }
  expect_nothing_left();
}

TEST(CudaDevice, AnotherStreamOfTheCallersGoesOnWhereTheOldOneIs) {
  const Machine machine({.delay_us_max = 1000});
  cudaStream_t streams[2];
  for (cudaStream_t& each : streams) {
    ASSERT_EQ(cudaStreamCreateWithFlags(&each, cudaStreamNonBlocking), cudaSuccess);
  }
  {
    const auto device = open_device();
    const DeviceBytes memory = std::move(DeviceBytes::allocate(*device, 2 * kBytes).value());
    for (int round = 1; round <= 20; ++round) {
      device->set_compute_stream(streams[0]);
      const Bytes source = bytes_of(round);
      device->copy_in(memory.data(), source.data(), kBytes);
      for (int copies = 0; copies < 10; ++copies) {
        device->copy(memory.data() + kBytes, memory.data(), kBytes);
      }
      device->set_compute_stream(streams[1]);
      Bytes seen = bytes_of(0);
      device->copy_out(seen.data(), memory.data() + kBytes, kBytes);
      ASSERT_EQ(seen, source);
    }
  }
  for (cudaStream_t each : streams) EXPECT_EQ(cudaStreamDestroy(each), cudaSuccess);
  expect_nothing_left();
}

TEST(CudaDevice, AStreamThatCapturesIsRefused) {
  const Machine machine;
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  {
    const auto device = open_device();
    fake_cuda::set_capturing(stream, true);
    device->set_compute_stream(stream);
    const Status status = device->drain();
    EXPECT_EQ(status.code(), StatusCode::kInvalid);
    EXPECT_NE(status.message().find("got a stream that captures"), std::string::npos);
  }
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  expect_nothing_left();
}

TEST(CudaDevice, IsOneOfThoseThatAreThere) {
  const Machine machine({.devices = 2});
  EXPECT_NE(cuda_device(2).make().status().message().find("one of 2 CUDA devices, got cuda:2"),
            std::string::npos);
  EXPECT_NE(open_device(1), nullptr);
  expect_nothing_left();
}

TEST(CudaDevice, WithoutOneThatIsSaid) {
  const Machine machine({.devices = 0});
  const Status status = cuda_device(0).make().status();
  EXPECT_EQ(status.code(), StatusCode::kInvalid);
  EXPECT_NE(status.message().find("CUDA finds none"), std::string::npos) << status.message();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(CudaDevice, TheCallersDeviceStaysItsOwn) {
  const Machine machine({.devices = 2});
  {
    const auto device = open_device(1);
    DeviceBytes memory = std::move(DeviceBytes::allocate(*device, kBytes).value());
    const Event event = device->make_event().value();
    const Bytes source = bytes_of(3);
    device->copy_in(memory.data(), source.data(), kBytes);
    device->launch(cuda::CopyRecordsArgs{.source = memory.data(),
                                         .source_stride = 1024,
                                         .target = memory.data() + 2048,
                                         .target_stride = 1024,
                                         .count = 2,
                                         .bytes = 1024});
    device->record(event);
    EXPECT_TRUE(device->synchronize(event).is_ok());
    device->wait(event);
    EXPECT_TRUE(device->drain().is_ok());
    int current = -1;
    EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
    EXPECT_EQ(current, 0);
  }
  expect_nothing_left();
}

/// As torch's cache keeps memory that no tensor uses.
TEST(CudaDevice, RoomIsMadeWhereThereIsNone) {
  const Machine machine({.bytes_max = 3 * kBytes});
  cudaMemPoolProps properties = {};
  cudaMemPool_t pool = nullptr;
  void* kept = nullptr;
  ASSERT_EQ(cudaMemPoolCreate(&pool, &properties), cudaSuccess);
  ASSERT_EQ(cudaMallocFromPoolAsync(&kept, 2 * kBytes, pool, nullptr), cudaSuccess);
  {
    const auto device = open_device(0, [&] {
      if (kept == nullptr) return;
      EXPECT_EQ(cudaFreeAsync(std::exchange(kept, nullptr), nullptr), cudaSuccess);
      EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    });
    EXPECT_TRUE(DeviceBytes::allocate(*device, 2 * kBytes).is_ok());
    EXPECT_EQ(kept, nullptr);
    const auto refused = DeviceBytes::allocate(*device, 4 * kBytes);
    ASSERT_FALSE(refused.is_ok());
    EXPECT_EQ(refused.status().code(), StatusCode::kBudget);
    EXPECT_NE(refused.status().message().find("lower kv_memory_bytes"), std::string::npos);
    EXPECT_TRUE(device->drain().is_ok()) << "the device goes on";
  }
  EXPECT_EQ(cudaMemPoolDestroy(pool), cudaSuccess);
  expect_nothing_left();
}

TEST(CudaDevice, AKernelsFaultIsToldByAllThatFollows) {
  const Machine machine;
  {
    const auto device = open_device();
    DeviceBytes memory = std::move(DeviceBytes::allocate(*device, kBytes).value());
    ASSERT_TRUE(device->drain().is_ok());
    fake_cuda::fail_next("a kernel", cudaErrorIllegalAddress);
    device->launch(cuda::CopyRecordsArgs{
        .source = memory.data(), .target = memory.data() + 2048, .count = 1, .bytes = 1024});
    for (int i = 0; i < 2; ++i) {
      const Status status = device->drain();
      EXPECT_EQ(status.code(), StatusCode::kStorage);
      EXPECT_NE(status.message().find("illegal memory access"), std::string::npos);
    }
    EXPECT_FALSE(DeviceBytes::allocate(*device, kBytes).is_ok());
    EXPECT_FALSE(device->make_event().is_ok());
  }
}

/// What a session does with a device; the first error of it.
Status use(Bytes& host) {
  auto made = cuda_device(0).make();
  KVSWAP_RETURN_IF_ERROR(made.status());
  Device& device = *made.value();
  auto memory = DeviceBytes::allocate(device, kBytes);
  KVSWAP_RETURN_IF_ERROR(memory.status());
  KVSWAP_RETURN_IF_ERROR(device.pin(host.data(), kBytes));
  const auto event = device.make_event();
  if (event.is_ok()) {
    device.record(event.value());
    device.copy_in(memory.value().data(), host.data(), kBytes / 2);
    device.copy(memory.value().data() + 2048, memory.value().data(), 1024);
    device.launch(cuda::CopyRecordsArgs{.source = memory.value().data(),
                                        .target = memory.value().data() + 1024,
                                        .count = 1,
                                        .bytes = 1024});
    device.copy_out(host.data() + kBytes / 2, memory.value().data(), kBytes / 2);
    device.wait(event.value());
    (void)device.synchronize(event.value()).is_ok();
    (void)device.seconds_between(event.value(), event.value());
  }
  device.unpin(host.data(), kBytes);
  KVSWAP_RETURN_IF_ERROR(event.status());
  memory.value() = {};
  return device.drain();
}

/// Every call of the runtime fails once: a Status says so, nothing is left behind, and torch, whose
/// next launch asks for the newest error of the thread, finds none of ours.
TEST(CudaDevice, ACallThatFailsIsToldOnceAndLeavesNothing) {
  std::set<std::string> names;
  {
    const Machine machine;
    Bytes host = bytes_of(1);
    ASSERT_TRUE(use(host).is_ok());
    for (const auto& [name, count] : fake_cuda::calls()) names.insert(name);
  }
  // They fail where every other call does, too, as after a kernel's fault.
  for (const char* never :
       {"cudaGetDevice", "cudaSetDevice", "cudaStreamSynchronize", "pageable copies"}) {
    names.erase(never);
  }
  ASSERT_GT(names.size(), 20u);
  // What they were to give back stays; an error of the destructor's has nobody to go to.
  const std::set<std::string> ends = {"cudaEventDestroy", "cudaStreamDestroy", "cudaMemPoolDestroy",
                                      "cudaFreeAsync", "cudaHostUnregister"};
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    const Machine machine;
    Bytes host = bytes_of(1);
    fake_cuda::fail_next(name, cudaErrorInvalidValue);
    const Status status = use(host);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    if (!name.ends_with("Destroy") && name != "cudaEventElapsedTime") {
      EXPECT_FALSE(status.is_ok());
    }
    if (!ends.contains(name)) expect_nothing_left();
  }
}

}  // namespace
}  // namespace kvswap
