#include "device/cuda/cuda_device.h"

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace kvswap {
namespace {

// Freed memory that is kept for the next allocation: summaries grow by small moves.
constexpr uint64_t kKeptBytes = uint64_t{32} << 20;

/// Makes a device the calling thread's, and gives the caller its own back.
class Current {
 public:
  explicit Current(int index) {
    (void)cudaGetDevice(&before_);
    if (before_ != index) (void)cudaSetDevice(index);
    is_changed_ = before_ != index;
  }
  ~Current() {
    if (is_changed_) (void)cudaSetDevice(before_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  int before_ = 0;
  bool is_changed_ = false;
};

Status failed(const std::string& what, cudaError_t error) {
  const std::string text = what + ": CUDA must not fail, got " + cudaGetErrorName(error) + " (" +
                           cudaGetErrorString(error) + ")";
  if (error == cudaErrorMemoryAllocation) {
    return Status::budget(
        text + "; lower kv_memory_bytes, memory.pages_per_layer, the context or the batch");
  }
  return Status::storage(text, 0);
}

/// An error that is reported here: torch, which asks for the thread's newest after its own
/// launches, need not find it. After a kernel's fault every call goes on to fail.
cudaError_t reported(cudaError_t error) {
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}

/// Errors are sticky: the first is kept.
class FirstError {
 public:
  void keep(Status status) {
    if (status_.is_ok()) status_ = std::move(status);
  }
  void keep(const char* what, cudaError_t error) {
    if (reported(error) != cudaSuccess) keep(failed(what, error));
  }
  const Status& status() const { return status_; }

 private:
  Status status_;
};

Status run(const cuda::BatchProjectKeysArgs& args, void* stream) {
  return cuda::project_keys(args, stream);
}
Status run(const cuda::BatchProjectQueryArgs& args, void* stream) {
  return cuda::project_query(args, stream);
}
Status run(const cuda::BatchSummarizeArgs& args, void* stream) {
  return cuda::summarize_groups(args, stream);
}
Status run(const cuda::BatchAskArgs& args, void* stream) { return cuda::ask_groups(args, stream); }
Status run(const cuda::BatchSelectArgs& args, void* stream) {
  return cuda::select_groups(args, stream);
}
Status run(const cuda::BatchTransferArgs& args, void* stream) {
  return cuda::pack_records(args, stream);
}
Status run(const cuda::CopyRecordsArgs& args, void* stream) {
  return cuda::copy_records(args, stream);
}
Status run(const RecordCodecArgs& args, void* stream) { return cuda::encode_records(args, stream); }
Status run(const AttentionCall& call, void* stream) {
  return cuda::paged_attention(call.args, call.scratch, stream);
}
Status run(const AttentionMassArgs& args, void* stream) {
  return cuda::attention_mass(args, stream);
}

std::string name_of(int index) { return "cuda:" + std::to_string(index); }

class CudaDevice final : public Device {
 public:
  CudaDevice(int index, const std::function<void()>& make_room)
      : index_(index), make_room_(make_room) {}
  ~CudaDevice() override;
  Status open();

  std::string name() const override { return name_of(index_); }

  Result<std::byte*> allocate(int64_t bytes) override;
  void free(std::byte* memory, int64_t bytes) override;
  Status pin(std::byte* host, int64_t bytes) override;
  void unpin(std::byte* host, int64_t bytes) override;

  Result<Event> make_event() override;
  void record(Event event) override {
    const Current current(index_);
    error_.keep("cudaEventRecord", cudaEventRecord(events_[event], queue()));
  }
  void wait(Event event) override {
    const Current current(index_);
    error_.keep("cudaStreamWaitEvent", cudaStreamWaitEvent(queue(), events_[event], 0));
  }
  Status synchronize(Event event) override {
    error_.keep("cudaEventSynchronize", cudaEventSynchronize(events_[event]));
    return error_.status();
  }
  double seconds_between(Event begin, Event end) override;
  Status drain() override;
  Status hand_back() override { return error_.status(); }
  void set_compute_stream(void* stream) override;

  void copy_in(void* to, const void* host, int64_t bytes) override {
    move(to, host, bytes, cudaMemcpyHostToDevice);
  }
  void copy_out(void* host, const void* from, int64_t bytes) override {
    move(host, from, bytes, cudaMemcpyDeviceToHost);
  }
  void copy(void* to, const void* from, int64_t bytes) override {
    move(to, from, bytes, cudaMemcpyDeviceToDevice);
  }

  void launch(const KernelLaunch& call) override {
    const Current current(index_);
    error_.keep(std::visit([this](const auto& args) { return run(args, queue()); }, call));
  }

 private:
  cudaStream_t queue() const { return streams_[static_cast<int>(stream())]; }
  void move(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) {
    if (bytes == 0) return;
    const Current current(index_);
    error_.keep("cudaMemcpyAsync", cudaMemcpyAsync(to, from, bytes, kind, queue()));
  }
  /// The first failure is the one that says why.
  int index_;
  std::function<void()> make_room_;
  std::array<cudaStream_t, kStreams> streams_{};  // compute is the caller's
  cudaStream_t memory_stream_ = nullptr;          // allocations alone
  cudaMemPool_t pool_ = nullptr;
  std::vector<cudaEvent_t> events_;
  cudaEvent_t changed_ = nullptr;  // of set_compute_stream()
  cudaEvent_t zeroed_ = nullptr;   // of allocate()
  cudaEvent_t unused_ = nullptr;   // of free()
  FirstError error_;
};

/// Before anything is made there.
Status check_device(int index) {
  const std::string name = name_of(index);
  int count = 0;
  if (const cudaError_t error = reported(cudaGetDeviceCount(&count)); error != cudaSuccess) {
    return Status::invalid("session: device must be a CUDA device of this machine, got " + name +
                           " where CUDA finds none (" + cudaGetErrorString(error) +
                           "); see what nvidia-smi says, or use the CPU");
  }
  if (index < 0 || index >= count) {
    return Status::invalid("session: device must be one of " + std::to_string(count) +
                           " CUDA devices, got " + name);
  }
  for (const auto& [what, needed] :
       {std::pair{"memory pools", cudaDevAttrMemoryPoolsSupported},
        std::pair{"locking of host memory", cudaDevAttrHostRegisterSupported}}) {
    int is_there = 0;
    const cudaError_t error = reported(cudaDeviceGetAttribute(&is_there, needed, index));
    if (error != cudaSuccess || is_there == 0) {
      return Status::invalid("session: device must have " + std::string(what) + ", and " + name +
                             " has none; use the CPU");
    }
  }
  return Status::ok();
}

Status CudaDevice::open() {
  const Current current(index_);
  int low = 0;
  int high = 0;
  error_.keep("cudaDeviceGetStreamPriorityRange", cudaDeviceGetStreamPriorityRange(&low, &high));
  for (const Stream each : {Stream::kScore, Stream::kLoad, Stream::kWrite}) {
    // What the next layer waits for goes first; what goes to disk fills the gaps.
    const int priority = each == Stream::kWrite ? low : high;
    error_.keep("cudaStreamCreate", cudaStreamCreateWithPriority(&streams_[static_cast<int>(each)],
                                                                 cudaStreamNonBlocking, priority));
  }
  error_.keep("cudaStreamCreate",
              cudaStreamCreateWithFlags(&memory_stream_, cudaStreamNonBlocking));
  for (cudaEvent_t* event : {&changed_, &zeroed_, &unused_}) {
    error_.keep("cudaEventCreate", cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  cudaMemPoolProps properties = {};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location = {cudaMemLocationTypeDevice, index_};
  error_.keep("cudaMemPoolCreate", cudaMemPoolCreate(&pool_, &properties));
  if (!error_.status().is_ok()) return error_.status();
  uint64_t kept = kKeptBytes;
  error_.keep("cudaMemPoolSetAttribute",
              cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &kept));
  return error_.status();
}

CudaDevice::~CudaDevice() {
  const Current current(index_);
  // Earlier calls of the session have returned its errors, and nobody is left to tell new ones.
  (void)drain().is_ok();
  for (const cudaEvent_t event : events_) (void)reported(cudaEventDestroy(event));
  for (const cudaEvent_t event : {changed_, zeroed_, unused_}) {
    if (event != nullptr) (void)reported(cudaEventDestroy(event));
  }
  if (memory_stream_ != nullptr) {
    (void)reported(cudaStreamSynchronize(memory_stream_));
    (void)reported(cudaStreamDestroy(memory_stream_));
  }
  if (pool_ != nullptr) (void)reported(cudaMemPoolDestroy(pool_));
  for (const Stream each : {Stream::kScore, Stream::kLoad, Stream::kWrite}) {
    const cudaStream_t stream = streams_[static_cast<int>(each)];
    if (stream != nullptr) (void)reported(cudaStreamDestroy(stream));
  }
}

Result<std::byte*> CudaDevice::allocate(int64_t bytes) {
  const Current current(index_);
  void* memory = nullptr;
  const std::string what = name() + ": allocating " + std::to_string(bytes) + " bytes";
  cudaError_t error = reported(cudaMallocFromPoolAsync(&memory, bytes, pool_, memory_stream_));
  if (error == cudaErrorMemoryAllocation && make_room_) {
    make_room_();
    error = reported(cudaMallocFromPoolAsync(&memory, bytes, pool_, memory_stream_));
  }
  if (error != cudaSuccess) return failed(what, error);
  error = reported(cudaMemsetAsync(memory, 0, bytes, memory_stream_));
  // All streams go on behind it, and the host does not wait.
  if (error == cudaSuccess) error = reported(cudaEventRecord(zeroed_, memory_stream_));
  for (const cudaStream_t stream : streams_) {
    if (error == cudaSuccess) error = reported(cudaStreamWaitEvent(stream, zeroed_, 0));
  }
  if (error != cudaSuccess) {
    (void)reported(cudaFreeAsync(memory, memory_stream_));  // no other stream has it
    return failed(what, error);
  }
  allocated_bytes_ += bytes;
  return static_cast<std::byte*>(memory);
}

void CudaDevice::free(std::byte* memory, int64_t bytes) {
  const Current current(index_);
  for (const cudaStream_t stream : streams_) {
    error_.keep("cudaEventRecord", cudaEventRecord(unused_, stream));
    error_.keep("cudaStreamWaitEvent", cudaStreamWaitEvent(memory_stream_, unused_, 0));
  }
  error_.keep("cudaFreeAsync", cudaFreeAsync(memory, memory_stream_));
  allocated_bytes_ -= bytes;
}

Status CudaDevice::pin(std::byte* host, int64_t bytes) {
  const Current current(index_);
  const cudaError_t error = reported(cudaHostRegister(host, bytes, cudaHostRegisterPortable));
  if (error != cudaSuccess) {
    return failed(name() + ": locking " + std::to_string(bytes) + " bytes of host memory", error);
  }
  pinned_bytes_ += bytes;
  return Status::ok();
}

void CudaDevice::unpin(std::byte* host, int64_t bytes) {
  const Current current(index_);
  (void)drain().is_ok();  // kept, and returned by the next call
  error_.keep("cudaHostUnregister", cudaHostUnregister(host));
  pinned_bytes_ -= bytes;
}

Result<Event> CudaDevice::make_event() {
  const Current current(index_);
  cudaEvent_t event = nullptr;
  const cudaError_t error = reported(cudaEventCreateWithFlags(&event, cudaEventDefault));
  if (error != cudaSuccess) return failed(name() + ": an event", error);
  events_.push_back(event);
  return static_cast<Event>(events_.size() - 1);
}

double CudaDevice::seconds_between(Event begin, Event end) {
  float milliseconds = 0;
  // One of them is not done: nothing is known.
  const cudaError_t error =
      reported(cudaEventElapsedTime(&milliseconds, events_[begin], events_[end]));
  if (error != cudaSuccess) return 0;
  return milliseconds * 1e-3;
}

Status CudaDevice::drain() {
  const Current current(index_);
  for (const cudaStream_t stream : streams_) {
    error_.keep("cudaStreamSynchronize", cudaStreamSynchronize(stream));
  }
  return error_.status();
}

void CudaDevice::set_compute_stream(void* stream) {
  cudaStream_t& compute = streams_[static_cast<int>(Stream::kCompute)];
  if (stream == compute) return;
  const Current current(index_);
  cudaStreamCaptureStatus captures = cudaStreamCaptureStatusNone;
  error_.keep("cudaStreamIsCapturing",
              cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &captures));
  if (captures != cudaStreamCaptureStatusNone) {
    error_.keep(Status::invalid(
        "session: must be used outside of the capture of a CUDA graph, since each step waits for "
        "what was chosen and read, got a stream that captures; open another session"));
    return;
  }
  // What the session did on the old stream comes before what it does on the new one.
  error_.keep("cudaEventRecord", cudaEventRecord(changed_, compute));
  compute = static_cast<cudaStream_t>(stream);
  error_.keep("cudaStreamWaitEvent", cudaStreamWaitEvent(compute, changed_, 0));
}

}  // namespace

DeviceKind cuda_device(int index, std::function<void()> make_room) {
  DeviceKind kind;
  kind.make = [index, make_room = std::move(make_room)]() -> Result<std::unique_ptr<Device>> {
    KVSWAP_RETURN_IF_ERROR(check_device(index));
    auto device = std::make_unique<CudaDevice>(index, make_room);
    KVSWAP_RETURN_IF_ERROR(device->open());
    return std::unique_ptr<Device>(std::move(device));
  };
  kind.scratch.select_groups = [](const cuda::BatchSelectArgs& args) {
    return cuda::select_groups_scratch_bytes(args);
  };
  kind.scratch.paged_attention = cuda::paged_attention_scratch_bytes;
  kind.head_dim_unit = 8;  // kernels/cuda/kernels.h
  kind.head_dim_max = 256;
  return kind;
}

}  // namespace kvswap
