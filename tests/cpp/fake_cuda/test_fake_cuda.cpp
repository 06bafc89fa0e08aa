// The fake itself: what CUDA answers, and that faults which CUDA would not tell are told.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "fake_cuda/runtime/fake_cuda.h"
#include "kernels_cuda/emulated/cuda_runtime.h"

namespace kvswap {
namespace {

using fake_cuda::Machine;
using Numbers = std::vector<int32_t>;
constexpr int kCount = 1024;
constexpr size_t kBytes = kCount * sizeof(int32_t);

void add_kernel(int32_t* numbers, int32_t addend) {
  numbers[blockIdx.x * 32 + threadIdx.x] += addend;
}

cudaError_t add(int32_t* numbers, int32_t addend, cudaStream_t stream) {
  cudaLaunchConfig_t config;
  config.gridDim.x = kCount / 32;
  config.blockDim.x = 32;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, add_kernel, numbers, addend);
}

class FakeCuda : public testing::Test {
 protected:
  FakeCuda() {
    testing::FLAGS_gtest_death_test_style = "threadsafe";
    cudaMemPoolProps properties = {};
    EXPECT_EQ(cudaMemPoolCreate(&pool_, &properties), cudaSuccess);
    for (cudaStream_t* each : {&slow_, &fast_}) {
      EXPECT_EQ(cudaStreamCreateWithFlags(each, cudaStreamNonBlocking), cudaSuccess);
    }
    EXPECT_EQ(cudaEventCreateWithFlags(&event_, cudaEventDefault), cudaSuccess);
  }
  ~FakeCuda() override {
    (void)cudaEventDestroy(event_);
    for (cudaStream_t each : {slow_, fast_}) (void)cudaStreamDestroy(each);
    (void)cudaMemPoolDestroy(pool_);
  }

  int32_t* allocate(cudaStream_t stream, size_t bytes = kBytes) {
    void* memory = nullptr;
    EXPECT_EQ(cudaMallocFromPoolAsync(&memory, bytes, pool_, stream), cudaSuccess);
    EXPECT_EQ(cudaMemsetAsync(memory, 0, bytes, stream), cudaSuccess);
    return static_cast<int32_t*>(memory);
  }
  void add_forty(int32_t* numbers, cudaStream_t stream) {
    for (int i = 0; i < 40; ++i) EXPECT_EQ(add(numbers, 1, stream), cudaSuccess);
  }
  Numbers contents(const int32_t* numbers, cudaStream_t stream) {
    Numbers host(kCount);
    EXPECT_EQ(cudaMemcpyAsync(host.data(), numbers, kBytes, cudaMemcpyDeviceToHost, stream),
              cudaSuccess);
    return host;
  }
  static Numbers all(int32_t number) { return Numbers(kCount, number); }

  Machine machine_{{.delay_us_max = 200, .devices = 2, .bytes_max = 1 << 20}};
  cudaMemPool_t pool_ = nullptr;
  cudaStream_t slow_ = nullptr;
  cudaStream_t fast_ = nullptr;
  cudaEvent_t event_ = nullptr;
};

using FakeCudaDeathTest = FakeCuda;

TEST_F(FakeCuda, AStreamKeepsItsOrder) {
  int32_t* numbers = allocate(slow_);
  add_forty(numbers, slow_);
  EXPECT_EQ(contents(numbers, slow_), all(40));
  EXPECT_EQ(cudaFreeAsync(numbers, slow_), cudaSuccess);
}

TEST_F(FakeCuda, AWaitIsForTheRecordThatWasThere) {
  int32_t* numbers = allocate(slow_);
  fake_cuda::Held slow(slow_);
  add_forty(numbers, slow_);
  ASSERT_EQ(cudaEventRecord(event_, slow_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(fast_, event_, 0), cudaSuccess);
  // Reached at once, and no answer to the wait above.
  ASSERT_EQ(cudaEventRecord(event_, nullptr), cudaSuccess);
  ASSERT_EQ(cudaEventSynchronize(event_), cudaSuccess);
  slow.let_go();
  EXPECT_EQ(contents(numbers, fast_), all(40));
  EXPECT_EQ(cudaFreeAsync(numbers, fast_), cudaSuccess);
}

/// Else nothing that is tested with it would be.
TEST_F(FakeCuda, WithoutAWaitAStreamRunsAhead) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a race, on purpose";
#endif
  int32_t* numbers = allocate(slow_);
  ASSERT_EQ(cudaStreamSynchronize(slow_), cudaSuccess);
  fake_cuda::Held slow(slow_);
  add_forty(numbers, slow_);
  EXPECT_EQ(contents(numbers, fast_), all(0));
  slow.let_go();
  EXPECT_EQ(contents(numbers, slow_), all(40));
  EXPECT_EQ(cudaFreeAsync(numbers, slow_), cudaSuccess);
}

TEST_F(FakeCuda, EventsKnowHowLongItTook) {
  cudaEvent_t end = nullptr, untimed = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&end, cudaEventDefault), cudaSuccess);
  ASSERT_EQ(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming), cudaSuccess);
  float took = -1;
  EXPECT_EQ(cudaEventElapsedTime(&took, event_, end), cudaErrorInvalidResourceHandle);
  int32_t* numbers = allocate(slow_);
  ASSERT_EQ(cudaEventRecord(event_, slow_), cudaSuccess);
  fake_cuda::Held slow(slow_);
  for (cudaEvent_t each : {end, untimed}) ASSERT_EQ(cudaEventRecord(each, slow_), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&took, event_, end), cudaErrorNotReady);
  slow.let_go();
  ASSERT_EQ(cudaEventSynchronize(end), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&took, event_, end), cudaSuccess);
  EXPECT_GT(took, 0);
  EXPECT_EQ(cudaEventElapsedTime(&took, event_, untimed), cudaErrorInvalidResourceHandle);
  for (cudaEvent_t each : {end, untimed}) EXPECT_EQ(cudaEventDestroy(each), cudaSuccess);
  EXPECT_EQ(cudaFreeAsync(numbers, slow_), cudaSuccess);
}

TEST_F(FakeCuda, APageableSourceIsTakenAtOnce) {
  int32_t* numbers = allocate(slow_);
  fake_cuda::Held slow(slow_);
  Numbers source = all(7);
  ASSERT_EQ(cudaMemcpyAsync(numbers, source.data(), kBytes, cudaMemcpyHostToDevice, slow_),
            cudaSuccess);
  source = all(8);
  slow.let_go();
  EXPECT_EQ(contents(numbers, slow_), all(7));
  EXPECT_EQ(fake_cuda::calls()["pageable copies"], 2);
  EXPECT_EQ(cudaFreeAsync(numbers, slow_), cudaSuccess);
}

TEST_F(FakeCuda, APinnedTargetIsNothingUntilItsCopyIsOver) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a race, on purpose";
#endif
  int32_t* numbers = allocate(slow_);
  Numbers target = all(0);
  ASSERT_EQ(cudaHostRegister(target.data(), kBytes, cudaHostRegisterPortable), cudaSuccess);
  fake_cuda::Held slow(slow_);
  add_forty(numbers, slow_);
  ASSERT_EQ(cudaMemcpyAsync(target.data(), numbers, kBytes, cudaMemcpyDeviceToHost, slow_),
            cudaSuccess);
  EXPECT_NE(target, all(0));
  EXPECT_NE(target, all(40));
  slow.let_go();
  ASSERT_EQ(cudaStreamSynchronize(slow_), cudaSuccess);
  EXPECT_EQ(target, all(40));
  EXPECT_EQ(fake_cuda::calls()["pageable copies"], 0);
  EXPECT_EQ(cudaHostUnregister(target.data()), cudaSuccess);
  EXPECT_EQ(cudaFreeAsync(numbers, slow_), cudaSuccess);
}

TEST_F(FakeCuda, HostMemoryIsPinnedOnce) {
  Numbers host = all(0);
  ASSERT_EQ(cudaHostRegister(host.data(), kBytes / 2, cudaHostRegisterPortable), cudaSuccess);
  EXPECT_EQ(cudaHostRegister(host.data() + 1, 4, cudaHostRegisterPortable),
            cudaErrorHostMemoryAlreadyRegistered);
  int32_t* numbers = allocate(slow_);
  EXPECT_EQ(cudaMemcpyAsync(numbers, host.data(), kBytes, cudaMemcpyHostToDevice, slow_),
            cudaErrorInvalidValue)
      << "half of it is pinned";
  EXPECT_EQ(cudaHostUnregister(host.data() + 1), cudaErrorHostMemoryNotRegistered);
  EXPECT_EQ(cudaHostUnregister(host.data()), cudaSuccess);
  EXPECT_EQ(cudaHostUnregister(host.data()), cudaErrorHostMemoryNotRegistered);
  EXPECT_EQ(cudaFreeAsync(numbers, slow_), cudaSuccess);
}

TEST_F(FakeCuda, ErrorsOfCallsAreToldOnceAndThoseOfKernelsForEver) {
  EXPECT_EQ(cudaFreeAsync(this, slow_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  void* memory = nullptr;
  EXPECT_EQ(cudaMallocFromPoolAsync(&memory, 2 << 20, pool_, slow_), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaStreamSynchronize(slow_), cudaSuccess);

  int32_t* numbers = allocate(slow_);
  fake_cuda::fail_next("a kernel", cudaErrorIllegalAddress);
  (void)add(numbers, 1, slow_);  // the fault may be there before the call returns
  EXPECT_EQ(cudaStreamSynchronize(slow_), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaStreamSynchronize(fast_), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
  emulated::break_device(cudaSuccess);
  EXPECT_EQ(cudaFreeAsync(numbers, slow_), cudaSuccess);
  EXPECT_EQ(cudaFreeAsync(numbers, slow_), cudaErrorInvalidValue) << "freed twice";
}

TEST_F(FakeCuda, WhatIsOfOneDeviceIsRefusedOnAnother) {
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaEventRecord(event_, nullptr), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventRecord(event_, slow_), cudaSuccess);
  cudaLaunchConfig_t config;
  config.blockDim.x = 32;
  config.stream = slow_;
  int32_t* none = nullptr;
  EXPECT_EQ(cudaLaunchKernelEx(&config, add_kernel, none, 1), cudaErrorInvalidResourceHandle);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

TEST_F(FakeCuda, WhatIsLeftIsCounted) {
  const fake_cuda::Left before = fake_cuda::left();
  int32_t* numbers = allocate(slow_);
  EXPECT_EQ(fake_cuda::left().allocations, before.allocations + 1);
  EXPECT_EQ(cudaFreeAsync(numbers, slow_), cudaSuccess);
  EXPECT_EQ(fake_cuda::left(), before);
}

TEST_F(FakeCudaDeathTest, TheHostTouchesNoDeviceMemory) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "there it is a race";
#endif
  int32_t* numbers = allocate(slow_);
  ASSERT_EQ(cudaStreamSynchronize(slow_), cudaSuccess);
  volatile int32_t seen = 0;
  EXPECT_DEATH(seen = *numbers, "the host touches device memory: byte 0 of an allocation of 4096");
  EXPECT_EQ(cudaFreeAsync(numbers, slow_), cudaSuccess);
  (void)seen;
}

TEST_F(FakeCudaDeathTest, AKernelTouchesOnlyWhatIsThere) {
  int32_t* numbers = allocate(slow_);
  EXPECT_DEATH(
      {
        (void)add(numbers + 1, 1, slow_);
        (void)cudaStreamSynchronize(slow_);
      },
      "a kernel touches device memory: byte 4096 of an allocation of 4096 that is shorter");
  EXPECT_DEATH(
      {
        (void)cudaFreeAsync(numbers, slow_);
        (void)add(numbers, 1, slow_);
        (void)cudaStreamSynchronize(slow_);
      },
      "a kernel touches device memory: byte [0-9]+ of an allocation of 4096 that is freed");
  EXPECT_DEATH(
      {
        const fake_cuda::Held slow(slow_);
        (void)add(allocate(slow_), 1, fast_);
        (void)cudaStreamSynchronize(fast_);
      },
      "a kernel touches device memory: byte [0-9]+ of an allocation of 4096 that is not there yet");
  EXPECT_EQ(cudaFreeAsync(numbers, slow_), cudaSuccess);
}

TEST_F(FakeCudaDeathTest, CopiesStayInWhatIsThere) {
  int32_t* numbers = allocate(slow_);
  EXPECT_DEATH((void)contents(numbers + 1, slow_), "a copy of 4096 bytes from byte 4 of");
  EXPECT_DEATH(
      {
        (void)cudaFreeAsync(numbers, slow_);
        (void)contents(numbers, slow_);
      },
      "a copy of 4096 bytes from byte 0 of an allocation of 4096 that is freed");
  EXPECT_EQ(cudaFreeAsync(numbers, slow_), cudaSuccess);
}

TEST_F(FakeCudaDeathTest, PinnedMemoryStaysAsItIsUntilItsCopyIsOver) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "there it is a race";
#endif
  int32_t* numbers = allocate(slow_);
  Numbers host = all(1);
  ASSERT_EQ(cudaHostRegister(host.data(), kBytes, cudaHostRegisterPortable), cudaSuccess);
  const auto copy = [&] {
    (void)cudaMemcpyAsync(numbers, host.data(), kBytes, cudaMemcpyHostToDevice, slow_);
  };
  EXPECT_DEATH(
      {
        fake_cuda::Held slow(slow_);
        copy();
        host[5] = 2;
        slow.let_go();
        (void)cudaStreamSynchronize(slow_);
      },
      "a pinned source has changed before its copy was over");
  EXPECT_DEATH(
      {
        fake_cuda::Held slow(slow_);
        copy();
        (void)cudaHostUnregister(host.data());
        slow.let_go();
        (void)cudaStreamSynchronize(slow_);
      },
      "host memory was unpinned before a copy of it was over");
  EXPECT_EQ(cudaHostUnregister(host.data()), cudaSuccess);
  EXPECT_EQ(cudaFreeAsync(numbers, slow_), cudaSuccess);
}

TEST_F(FakeCudaDeathTest, WhatWasDestroyedIsNotUsed) {
  EXPECT_DEATH(
      {
        (void)cudaEventDestroy(event_);
        (void)cudaEventRecord(event_, slow_);
      },
      "an event that is none, or was destroyed");
  EXPECT_DEATH(
      {
        (void)cudaStreamDestroy(slow_);
        (void)cudaStreamSynchronize(slow_);
      },
      "a stream that is none, or was destroyed");
}

}  // namespace
}  // namespace kvswap
