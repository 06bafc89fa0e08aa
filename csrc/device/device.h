#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>

#include "io/status.h"
#include "kernels/cuda/kernels.h"

namespace kvswap {

/// The queues of a device. Each does its operations in order, beside the others; between two of
/// them only events give an order.
enum class Stream {
  kCompute,  ///< the caller's own: what it hands in is ready there, and is used there next
  kScore,    ///< who is chosen, beside the layer before
  kLoad,     ///< records on their way in: staging, then their pages
  kWrite,    ///< records on their way out
};
inline constexpr int kStreams = 4;

/// Belongs to the device that made it. Marks a point of a stream each time it is recorded.
using Event = int32_t;

/// A kernel, by its arguments: the batched contracts of kernels/cuda/kernels.h, which needs no
/// CUDA. All arrays, and what they name, are on the device. Scratch is what the kind's ScratchSizes
/// say of the same arguments; kernels of one stream may share it.
struct AttentionCall {
  PagedAttentionArgs args;
  void* scratch = nullptr;
};
using KernelLaunch = std::variant<cuda::BatchProjectKeysArgs,   // project_keys()
                                  cuda::BatchProjectQueryArgs,  // project_query()
                                  cuda::BatchSummarizeArgs,     // summarize_groups()
                                  cuda::BatchAskArgs,           // ask_groups()
                                  cuda::BatchSelectArgs,        // select_groups()
                                  cuda::BatchTransferArgs,      // pack_records()
                                  cuda::CopyRecordsArgs,        // copy_records()
                                  RecordCodecArgs,              // encode_records()
                                  AttentionCall,                // paged_attention()
                                  AttentionMassArgs>;           // attention_mass()

/// What the engine needs of an accelerator: memory, streams, events, copies and its kernels.
///
/// Operations are queued on the current stream (on() sets it) and return at once; pointers are the
/// device's unless called host. What a queued operation reads or writes, on either side, stays as
/// it is until an event recorded after it is done. Errors are sticky: the next
/// synchronize() or drain() returns them, and all after it.
///
/// On a machine whose accelerator shares the host's memory, reads can land in their pages: then
/// StagingBuffers (engine/) lends pages instead of lanes, and neither copy nor scatter is left.
///
/// Thread rules: one thread at a time. The destructor waits for what is queued.
class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;

  // Memory. Seldom in a step: when a batch, a context or a projection is new, or a summary grows.

  /// Zeroed for all that is queued from now on, aligned to 256 bytes at least. Counted by
  /// allocated_bytes() until free().
  virtual Result<std::byte*> allocate(int64_t bytes) = 0;
  /// What is queued may still use it.
  virtual void free(std::byte* memory, int64_t bytes) = 0;
  /// Locks host memory for the copies below; it belongs to the caller, who unpins it first.
  virtual Status pin(std::byte* host, int64_t bytes) = 0;
  virtual void unpin(std::byte* host, int64_t bytes) = 0;

  // Order.

  virtual Result<Event> make_event() = 0;
  /// Marks what is queued on the current stream so far.
  virtual void record(Event event) = 0;
  /// The current stream goes on when the last record() of `event` is reached. Never recorded: now.
  virtual void wait(Event event) = 0;
  /// The host waits for the last record(); never recorded: returns at once.
  virtual Status synchronize(Event event) = 0;
  /// Seconds between two events; 0 while one of them is not done.
  virtual double seconds_between(Event begin, Event end) = 0;
  /// The host waits for all streams of this object, not for the whole device. Never in a step.
  virtual Status drain() = 0;
  /// The caller may use and free its tensors as its own stream allows. Nothing where it has one.
  virtual Status hand_back() = 0;
  /// The caller's stream from now on, as its runtime calls it.
  virtual void set_compute_stream(void* stream) = 0;

  // Copies.

  virtual void copy_in(void* to, const void* host, int64_t bytes) = 0;
  virtual void copy_out(void* host, const void* from, int64_t bytes) = 0;
  virtual void copy(void* to, const void* from, int64_t bytes) = 0;

  virtual void launch(const KernelLaunch& call) = 0;

  int64_t allocated_bytes() const { return allocated_bytes_; }
  int64_t pinned_bytes() const { return pinned_bytes_; }
  Stream stream() const { return stream_; }

  /// Makes a stream the current one for as long as it lives.
  class On {
   public:
    On(Device& device, Stream stream)
        : device_(device), before_(std::exchange(device.stream_, stream)) {}
    ~On() { device_.stream_ = before_; }
    On(const On&) = delete;
    On& operator=(const On&) = delete;

   private:
    Device& device_;
    Stream before_;
  };

 protected:
  int64_t allocated_bytes_ = 0;
  int64_t pinned_bytes_ = 0;

 private:
  Stream stream_ = Stream::kCompute;
};

/// Bytes of scratch that kernels of a kind of device take.
struct ScratchSizes {
  int64_t (*select_groups)(const cuda::BatchSelectArgs& args) = nullptr;
  int64_t (*paged_attention)(const PagedAttentionArgs& args) = nullptr;
};

/// What a session can run on beside the CPU; nothing is touched before make().
struct DeviceKind {
  std::function<Result<std::unique_ptr<Device>>()> make;
  ScratchSizes scratch;
  // Of a head, what its kernels attend: a multiple of the unit, at most this many numbers.
  int64_t head_dim_unit = 1;
  int64_t head_dim_max = 1024;
};

/// Gives each of `events` an event of its own.
Status make_events(Device& device, std::span<Event* const> events);

/// Device memory with an owner; freed on destruction.
class DeviceBytes {
 public:
  DeviceBytes() = default;
  static Result<DeviceBytes> allocate(Device& device, int64_t bytes);
  DeviceBytes(DeviceBytes&& other) noexcept { *this = std::move(other); }
  DeviceBytes& operator=(DeviceBytes&& other) noexcept;
  ~DeviceBytes();
  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  Device* device_ = nullptr;
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace kvswap
