#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

#include "fake_cuda.h"
#include "stream.h"

namespace fake_cuda {

/// Host memory that is pinned. Any thread; those that only look order nothing between them.
class PinnedMemory {
 public:
  enum class Kind { kPageable, kPinned, kBoth };
  Kind kind(const void* host, int64_t bytes) const;
  cudaError_t add(const void* host, int64_t bytes);
  cudaError_t remove(const void* host);
  void remove_all();
  int64_t count() const;

 private:
  Kind look(const std::byte* begin, const std::byte* end) const;

  mutable std::shared_mutex mutex_;
  std::map<const std::byte*, int64_t> bytes_;  // by where they begin
};

/// What all calls share. Streams' threads look at pinned memory alone.
struct State {
  PinnedMemory pinned;
  std::mutex mutex;  // of what follows
  Options options;
  std::set<CUevent_st*> events;
  std::set<CUmemPoolHandle_st*> pools;
  std::map<CUstream_st*, std::unique_ptr<CUstream_st>> streams;
  std::vector<std::unique_ptr<CUstream_st>> own_streams;  // [devices]
  std::map<std::string, int64_t> calls;
  std::map<std::string, cudaError_t> failures;  // of the next call of a name
  uint64_t streams_made = 0;
};
State& state();

/// The calling thread's device.
int& current_device();

/// A stream by its handle; stops where there is none.
CUstream_st& stream_of(cudaStream_t stream);
CUstream_st* make_stream(int device);

void count(const char* what);
/// Counts the call; what it has to return at once.
cudaError_t enter(const char* name);
cudaError_t planned_failure(const char* name);

/// What every call is made of. An earlier operation's fault may be returned by any of them.
template <typename Body>
cudaError_t call(const char* name, const Body& body) {
  cudaError_t error = enter(name);
  if (error == cudaSuccess) error = body();
  return emulated::fail(error == cudaSuccess ? emulated::broken() : error);
}

}  // namespace fake_cuda
