#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "kernels_cuda/emulated/cuda_runtime_api.h"

/// The CUDA runtime on a machine without a device, for tests of what calls it.
///
/// A stream is a thread that does its operations in order and late. Device memory is open to
/// kernels and copies only (device_memory.h). Kernels run as kernels_cuda/emulated has them, their
/// threads shuffled. What CUDA answers with an error is answered so; what it leaves undefined ends
/// the process with a sentence: memory that is not there, a pinned source that changes under way.
///
/// Two copies under way at once that share pinned bytes, one as a target, are taken for such a
/// change.
///
/// Not faked: capture, more than one process, blocking streams, unified memory, and speed.
namespace fake_cuda {

struct Options {
  uint64_t seed = 1;           // of the delays
  int64_t delay_us_max = 100;  // a stream sleeps up to so long before some operations
  int devices = 1;
  int64_t bytes_max = int64_t{1} << 40;  // of device memory
};

/// What a program has made and not given back.
struct Left {
  int64_t allocations = 0;
  int64_t pinned = 0;
  int64_t streams = 0;
  int64_t events = 0;
  int64_t pools = 0;
  bool operator==(const Left&) const = default;
};
Left left();

/// A machine as new, until its end. One at a time.
class Machine {
 public:
  explicit Machine(const Options& options = {});
  /// Waits for all streams; what is left() goes with it.
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
};

/// How often each call was made since count_calls(): "cudaMemcpyAsync", ...; launches are
/// "cudaLaunchKernel". Copies that the host waits for, since their host memory is not pinned, are
/// "pageable copies" besides.
std::map<std::string, int64_t> calls();
void count_calls();
/// As long as it lives the thread's calls are a test's own, and not counted.
class Uncounted {
 public:
  Uncounted();
  ~Uncounted();
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;
};

/// The next call of this name does nothing but return the error; "a kernel" fails on the device,
/// when its turn comes, and leaves the device broken.
void fail_next(const std::string& call, cudaError_t error);
class Point;
/// A stream stands still from here until let_go().
class Held {
 public:
  explicit Held(cudaStream_t stream);
  ~Held() { let_go(); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  void let_go();

 private:
  std::shared_ptr<Point> point_;
};

/// What cudaStreamIsCapturing() says of a stream; null: the current device's own.
void set_capturing(cudaStream_t stream, bool is_capturing);

}  // namespace fake_cuda
