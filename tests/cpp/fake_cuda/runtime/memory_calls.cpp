// Pools, pinned memory and copies.

#include <cstring>
#include <string_view>
#include <vector>

#include "device_memory.h"
#include "machine.h"

using fake_cuda::call;
using fake_cuda::DeviceMemory;
using fake_cuda::state;
using fake_cuda::stream_of;
using Kind = fake_cuda::PinnedMemory::Kind;

namespace {

constexpr int kUnderWay = 0xdb;  // what a target holds until its copy has landed

size_t hash_of(const void* memory, size_t bytes) {
  return std::hash<std::string_view>()({static_cast<const char*>(memory), bytes});
}

Kind kind_of(const void* host, size_t bytes) {
  return state().pinned.kind(host, static_cast<int64_t>(bytes));
}

void expect_pinned(const void* host, size_t bytes) {
  if (kind_of(host, bytes) != Kind::kPinned) {
    fake_cuda::stop("host memory was unpinned before a copy of it was over");
  }
}

std::byte* reach(const void* address, size_t bytes) {
  return DeviceMemory::get().reach(address, static_cast<int64_t>(bytes), "a copy");
}

/// Not pinned: taken at once, as CUDA stages it.
void copy_in(void* to, const void* from, size_t bytes, bool is_pinned, CUstream_st& stream) {
  if (!is_pinned) {
    fake_cuda::count("pageable copies");
    const auto* begin = static_cast<const std::byte*>(from);
    stream.push([to, bytes, staged = std::vector<std::byte>(begin, begin + bytes)] {
      std::memcpy(reach(to, bytes), staged.data(), bytes);
    });
    return;
  }
  stream.push([to, from, bytes, before = hash_of(from, bytes)] {
    expect_pinned(from, bytes);
    if (hash_of(from, bytes) != before) {
      fake_cuda::stop("a pinned source has changed before its copy was over");
    }
    std::memcpy(reach(to, bytes), from, bytes);
  });
}

/// Not pinned: the host waits, as CUDA has it.
void copy_out(void* to, const void* from, size_t bytes, bool is_pinned, CUstream_st& stream) {
  if (is_pinned) std::memset(to, kUnderWay, bytes);
  stream.push([to, from, bytes, is_pinned] {
    if (is_pinned) expect_pinned(to, bytes);
    std::memcpy(to, reach(from, bytes), bytes);
  });
  if (is_pinned) return;
  fake_cuda::count("pageable copies");
  stream.wait_until_done();
}

}  // namespace

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
  return call(__func__, [&] {
    *pool = new CUmemPoolHandle_st{.device = properties->location.id};
    const std::lock_guard lock(state().mutex);
    state().pools.insert(*pool);
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return call(__func__, [] { return cudaSuccess; });
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  return call(__func__, [&] {
    const std::lock_guard lock(state().mutex);
    if (state().pools.erase(pool) == 0) fake_cuda::stop("a pool that is none, or was destroyed");
    delete pool;
    return cudaSuccess;
  });
}

cudaError_t cudaMallocFromPoolAsync(void** memory, size_t bytes, cudaMemPool_t,
                                    cudaStream_t stream) {
  return call(__func__, [&] {
    CUstream_st& on = stream_of(stream);
    *memory = DeviceMemory::get().reserve(static_cast<int64_t>(bytes), state().options.bytes_max);
    if (*memory == nullptr) return cudaErrorMemoryAllocation;
    on.push([reserved = *memory] { DeviceMemory::get().appear(reserved); });
    return cudaSuccess;
  });
}

cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  return call(__func__, [&] {
    CUstream_st& on = stream_of(stream);
    if (!DeviceMemory::get().give_back(memory)) return cudaErrorInvalidValue;
    on.push([memory] { DeviceMemory::get().vanish(memory); });
    return cudaSuccess;
  });
}

cudaError_t cudaHostRegister(void* host, size_t bytes, unsigned) {
  return call(__func__, [&] {
    if (DeviceMemory::get().holds(host)) return cudaErrorInvalidValue;
    return state().pinned.add(host, static_cast<int64_t>(bytes));
  });
}

cudaError_t cudaHostUnregister(void* host) {
  return call(__func__, [&] { return state().pinned.remove(host); });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return call(__func__, [&] {
    CUstream_st& on = stream_of(stream);
    const DeviceMemory& memory = DeviceMemory::get();
    if (memory.holds(to) != (kind != cudaMemcpyDeviceToHost) ||
        memory.holds(from) != (kind != cudaMemcpyHostToDevice)) {
      return cudaErrorInvalidValue;
    }
    if (kind == cudaMemcpyDeviceToDevice) {
      on.push([=] { std::memmove(reach(to, bytes), reach(from, bytes), bytes); });
      return cudaSuccess;
    }
    const bool comes_in = kind == cudaMemcpyHostToDevice;
    const Kind host = kind_of(comes_in ? from : to, bytes);
    if (host == Kind::kBoth) return cudaErrorInvalidValue;
    if (comes_in) {
      copy_in(to, from, bytes, host == Kind::kPinned, on);
    } else {
      copy_out(to, from, bytes, host == Kind::kPinned, on);
    }
    return cudaSuccess;
  });
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  return call(__func__, [&] {
    stream_of(stream).push([=] { std::memset(reach(memory, bytes), value, bytes); });
    return cudaSuccess;
  });
}
