#include "machine.h"

#include <utility>

#include "device_memory.h"
#include "kernels_cuda/emulated/cuda_runtime.h"

namespace fake_cuda {
namespace {

thread_local int uncounted = 0;

cudaError_t launch(cudaStream_t handle, std::function<void()> kernel) {
  return call("cudaLaunchKernel", [&] {
    CUstream_st& stream = stream_of(handle);
    if (stream.device != current_device()) return cudaErrorInvalidResourceHandle;
    const cudaError_t fault = planned_failure("a kernel");
    stream.push([kernel = std::move(kernel), fault] {
      if (fault != cudaSuccess) return emulated::break_device(fault);
      const DeviceMemory::Running running;
      kernel();
    });
    return cudaSuccess;
  });
}

void check_load(const void* address) {
  if (!DeviceMemory::get().holds(address)) stop("a kernel loads what is no device memory");
}

}  // namespace

PinnedMemory::Kind PinnedMemory::look(const std::byte* begin, const std::byte* end) const {
  for (const auto& [pinned, length] : bytes_) {
    if (pinned <= begin && end <= pinned + length) return Kind::kPinned;
    if (begin < pinned + length && pinned < end) return Kind::kBoth;
  }
  return Kind::kPageable;
}

PinnedMemory::Kind PinnedMemory::kind(const void* host, int64_t bytes) const {
  const std::shared_lock lock(mutex_);
  const auto* begin = static_cast<const std::byte*>(host);
  return look(begin, begin + bytes);
}

cudaError_t PinnedMemory::add(const void* host, int64_t bytes) {
  const std::unique_lock lock(mutex_);
  const auto* begin = static_cast<const std::byte*>(host);
  if (begin == nullptr || bytes == 0) return cudaErrorInvalidValue;
  if (look(begin, begin + bytes) != Kind::kPageable) return cudaErrorHostMemoryAlreadyRegistered;
  bytes_[begin] = bytes;
  return cudaSuccess;
}

cudaError_t PinnedMemory::remove(const void* host) {
  const std::unique_lock lock(mutex_);
  const bool was_pinned = bytes_.erase(static_cast<const std::byte*>(host)) > 0;
  return was_pinned ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}

void PinnedMemory::remove_all() {
  const std::unique_lock lock(mutex_);
  bytes_.clear();
}

int64_t PinnedMemory::count() const {
  const std::shared_lock lock(mutex_);
  return static_cast<int64_t>(bytes_.size());
}

State& state() {
  static State& all = *new State();
  return all;
}

int& current_device() {
  static thread_local int device = 0;
  return device;
}

CUstream_st* make_stream(int device) {
  const Options& options = state().options;
  return new CUstream_st(device, options.seed * 1000 + ++state().streams_made,
                         options.delay_us_max);
}

CUstream_st& stream_of(cudaStream_t stream) {
  const std::lock_guard lock(state().mutex);
  if (stream == nullptr) return *state().own_streams.at(current_device());
  if (!state().streams.contains(stream)) stop("a stream that is none, or was destroyed");
  return *stream;
}

Uncounted::Uncounted() { ++uncounted; }
Uncounted::~Uncounted() { --uncounted; }

void count(const char* what) {
  const std::lock_guard lock(state().mutex);
  if (uncounted == 0) ++state().calls[what];
}

cudaError_t enter(const char* name) {
  count(name);
  const std::lock_guard lock(state().mutex);
  if (emulated::broken() != cudaSuccess) return emulated::broken();
  const auto planned = state().failures.extract(name);
  return planned.empty() ? cudaSuccess : planned.mapped();
}

cudaError_t planned_failure(const char* name) {
  const std::lock_guard lock(state().mutex);
  const auto planned = state().failures.extract(name);
  return planned.empty() ? cudaSuccess : planned.mapped();
}

Machine::Machine(const Options& options) {
  if (!state().own_streams.empty()) stop("there is a machine already");
  (void)DeviceMemory::get();
  emulated::order = emulated::Order::kShuffled;
  emulated::queue = launch;
  emulated::check_load = check_load;
  state().options = options;
  state().streams_made = 0;
  state().failures.clear();
  state().calls.clear();
  for (int device = 0; device < options.devices; ++device) {
    state().own_streams.emplace_back(make_stream(device));
  }
  current_device() = 0;
}

Machine::~Machine() {
  for (const auto& [handle, stream] : state().streams) stream->wait_until_done();
  for (const auto& stream : state().own_streams) stream->wait_until_done();
  state().own_streams.clear();
  state().streams.clear();
  for (CUevent_st* event : std::exchange(state().events, {})) delete event;
  for (CUmemPoolHandle_st* pool : std::exchange(state().pools, {})) delete pool;
  state().pinned.remove_all();
  DeviceMemory::get().vanish_all();
  emulated::break_device(cudaSuccess);
  (void)cudaGetLastError();
  emulated::queue = nullptr;
  emulated::check_load = nullptr;
}

Left left() {
  const std::lock_guard lock(state().mutex);
  return {.allocations = DeviceMemory::get().allocations(),
          .pinned = state().pinned.count(),
          .streams = static_cast<int64_t>(state().streams.size()),
          .events = static_cast<int64_t>(state().events.size()),
          .pools = static_cast<int64_t>(state().pools.size())};
}

std::map<std::string, int64_t> calls() {
  const std::lock_guard lock(state().mutex);
  return state().calls;
}

void count_calls() {
  const std::lock_guard lock(state().mutex);
  state().calls.clear();
}

void fail_next(const std::string& call, cudaError_t error) {
  const std::lock_guard lock(state().mutex);
  state().failures[call] = error;
}

Held::Held(cudaStream_t stream) : point_(std::make_shared<Point>()) {
  stream_of(stream).push([point = point_] { point->wait(); });
}
void Held::let_go() { point_->reach(); }

void set_capturing(cudaStream_t stream, bool is_capturing) {
  stream_of(stream).is_capturing = is_capturing;
}

}  // namespace fake_cuda
