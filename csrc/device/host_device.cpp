#include "device/host_device.h"

#include <array>
#include <cstdlib>
#include <cstring>

#include "device/host_kernels.h"
#include "device/host_stream.h"

namespace kvswap {
namespace {

constexpr int64_t kAlignment = 4096;

void run(const cuda::BatchProjectKeysArgs& args) { host_kernels::project_keys(args); }
void run(const cuda::BatchProjectQueryArgs& args) { host_kernels::project_query(args); }
void run(const cuda::BatchSummarizeArgs& args) { host_kernels::summarize_groups(args); }
void run(const cuda::BatchAskArgs& args) { host_kernels::ask_groups(args); }
void run(const cuda::BatchSelectArgs& args) { host_kernels::select_groups(args); }
void run(const cuda::BatchTransferArgs& args) { host_kernels::pack_records(args); }
void run(const cuda::CopyRecordsArgs& args) { host_kernels::copy_records(args); }
void run(const RecordCodecArgs& args) { encode_records(args, {}); }
void run(const AttentionCall& call) { paged_attention(call.args, {}); }
void run(const AttentionMassArgs& args) { attention_mass(args, {}); }

class HostDevice final : public Device {
 public:
  explicit HostDevice(const HostDeviceOptions& options) : bytes_max_(options.bytes_max) {
    for (int i = 0; i < kStreams; ++i) {
      const bool is_slow = options.slow == static_cast<Stream>(i);
      streams_[i] = std::make_unique<HostStream>(options.seed + i, options.delay_us_max,
                                                 is_slow ? options.slow_us : 0);
    }
  }
  Status start() {
    for (auto& stream : streams_) KVSWAP_RETURN_IF_ERROR(stream->start());
    handed_back_ = events_.make();
    return Status::ok();
  }

  std::string name() const override { return "host"; }

  Result<std::byte*> allocate(int64_t bytes) override {
    KVSWAP_RETURN_IF_ERROR(check_room(bytes));
    const int64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
    if (memory == nullptr) return no_room(bytes);
    std::memset(memory, 0, rounded);
    allocated_bytes_ += bytes;
    return memory;
  }
  void free(std::byte* memory, int64_t bytes) override {
    (void)drain().is_ok();
    std::free(memory);
    allocated_bytes_ -= bytes;
  }
  Status pin(std::byte*, int64_t bytes) override {
    KVSWAP_RETURN_IF_ERROR(check_room(bytes));
    pinned_bytes_ += bytes;
    return Status::ok();
  }
  void unpin(std::byte*, int64_t bytes) override { pinned_bytes_ -= bytes; }

  Result<Event> make_event() override { return events_.make(); }
  void record(Event event) override {
    queue([this, event, point = events_.mark(event)] { events_.reach(event, point); });
  }
  void wait(Event event) override {
    queue([this, event, point = events_.last(event)] { events_.wait(event, point); });
  }
  Status synchronize(Event event) override {
    events_.wait(event, events_.last(event));
    return Status::ok();
  }
  double seconds_between(Event begin, Event end) override {
    return events_.seconds_between(begin, end);
  }
  Status drain() override {
    // A stream may wait for another's events, all of which are queued.
    for (auto& stream : streams_) stream->drain();
    return Status::ok();
  }
  /// CPU tensors know no stream: what uses them must be done.
  Status hand_back() override {
    const On compute(*this, Stream::kCompute);
    record(handed_back_);
    return synchronize(handed_back_);
  }
  void set_compute_stream(void*) override {}

  void copy_in(void* to, const void* host, int64_t bytes) override { copy(to, host, bytes); }
  void copy_out(void* host, const void* from, int64_t bytes) override { copy(host, from, bytes); }
  void copy(void* to, const void* from, int64_t bytes) override {
    queue([=] { std::memcpy(to, from, bytes); });
  }

  void launch(const KernelLaunch& call) override {
    queue([call] { std::visit([](const auto& args) { run(args); }, call); });
  }

 private:
  static Status no_room(int64_t bytes) {
    return Status::budget("device: the host must lend " + std::to_string(bytes) +
                          " bytes, and refused");
  }
  Status check_room(int64_t bytes) const {
    const bool fits =
        bytes_max_ == nullptr || allocated_bytes_ + pinned_bytes_ + bytes <= *bytes_max_;
    return fits ? Status::ok() : no_room(bytes);
  }
  void queue(std::function<void()> operation) {
    streams_[static_cast<int>(stream())]->push(std::move(operation));
  }

  const std::atomic<int64_t>* bytes_max_;
  HostEvents events_;  // outlives the streams
  std::array<std::unique_ptr<HostStream>, kStreams> streams_;
  Event handed_back_ = 0;
};

}  // namespace

DeviceKind host_device(const HostDeviceOptions& options) {
  DeviceKind kind;
  kind.make = [options]() -> Result<std::unique_ptr<Device>> {
    auto device = std::make_unique<HostDevice>(options);
    KVSWAP_RETURN_IF_ERROR(device->start());
    return std::unique_ptr<Device>(std::move(device));
  };
  kind.scratch.select_groups = host_kernels::select_groups_scratch_bytes;
  kind.scratch.paged_attention = [](const PagedAttentionArgs&) { return int64_t{0}; };
  return kind;
}

}  // namespace kvswap
