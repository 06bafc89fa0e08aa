#pragma once

#include <gtest/gtest.h>

#include <array>

#include "engine/caller_memory.h"
#include "fake_cuda/runtime/fake_cuda.h"

namespace kvswap {

/// A caller's tensors on the device, used on its own stream, as torch has them: one that is given
/// anew is freed in that stream's order, and may be used by no other stream after that.
class DeviceTensors final : public CallerMemory {
 public:
  DeviceTensors() {
    cudaMemPoolProps properties = {};
    properties.location = {cudaMemLocationTypeDevice, 0};
    must(cudaMemPoolCreate(&pool_, &properties));
  }
  ~DeviceTensors() override {
    for (void*& each : given_) free(each);
    free(answer_);
    must(cudaStreamSynchronize(nullptr));
    must(cudaMemPoolDestroy(pool_));
  }

  const void* give(int slot, const void* host, int64_t bytes) override {
    const fake_cuda::Uncounted own;
    allocate(given_.at(slot), bytes);
    must(cudaMemcpyAsync(given_[slot], host, bytes, cudaMemcpyHostToDevice, nullptr));
    return given_[slot];
  }
  void* room(std::vector<std::byte>& answer) override {
    const fake_cuda::Uncounted own;
    allocate(answer_, static_cast<int64_t>(answer.size()));
    return answer_;
  }
  void take(std::vector<std::byte>& answer) override {
    const fake_cuda::Uncounted own;
    must(cudaMemcpyAsync(answer.data(), answer_, answer.size(), cudaMemcpyDeviceToHost, nullptr));
    free(answer_);
  }

 private:
  static void must(cudaError_t error) { ASSERT_EQ(error, cudaSuccess); }
  void allocate(void*& memory, int64_t bytes) {
    free(memory);
    must(cudaMallocFromPoolAsync(&memory, bytes, pool_, nullptr));
  }
  void free(void*& memory) {
    if (memory != nullptr) must(cudaFreeAsync(memory, nullptr));
    memory = nullptr;
  }

  cudaMemPool_t pool_ = nullptr;
  std::array<void*, 3> given_{};
  void* answer_ = nullptr;
};

}  // namespace kvswap
