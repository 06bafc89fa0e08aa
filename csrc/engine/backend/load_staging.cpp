#include "engine/backend/load_staging.h"

namespace kvswap {

Status DeviceLoadStaging::open() {
  Event* const events[] = {&needs_, &has_};
  KVSWAP_RETURN_IF_ERROR(make_events(device_, events));
  return buffers_.open();
}

Status DeviceLoadStaging::reserve(int64_t lane_records) {
  const int64_t bytes = lane_records * record_bytes_;
  lane_memory_ = {};
  auto pinned = PinnedBuffer::allocate(device_, StagingBuffers::kLanes * bytes, pinned_at_end_);
  if (!pinned.is_ok()) return pinned.status();
  lane_memory_ = std::move(pinned.value());
  buffers_.reserve(lane_memory_.data(), lane_records, record_bytes_);
  staging_ = {};
  auto staging = DeviceBytes::allocate(device_, bytes);
  if (!staging.is_ok()) return staging.status();
  staging_ = std::move(staging.value());
  return Status::ok();
}

Result<std::shared_ptr<std::byte>> DeviceLoadStaging::make_landing(int64_t bytes) {
  auto pinned = PinnedBuffer::allocate(device_, bytes, pinned_at_end_);
  if (!pinned.is_ok()) return pinned.status();
  const auto owner = std::make_shared<PinnedBuffer>(std::move(pinned.value()));
  return std::shared_ptr<std::byte>(owner, owner->data());
}

Status DeviceLoadStaging::publish(Fetch& fetch) {
  if (fetch.lane < 0) return Status::ok();
  const bool is_timed = published_++ % kTimedEvery == 0;
  std::vector<std::byte*> pages;
  for (const Load& load : fetch.loads) pages.push_back(load.home);
  const Event copied = buffers_.copied(fetch);
  {
    const Device::On load(device_, Stream::kLoad);
    device_.wait(compute_.attended(fetch.layer));
    const auto bytes = static_cast<int64_t>(pages.size() * sizeof(std::byte*));
    auto tables = tables_->open(UploadRing::padded(bytes));
    std::byte* const* on_device = tables.add(pages);
    tables.send();
    buffers_.copy(fetch, staging_.data(), on_device, is_timed);
  }
  counters_.copied_bytes += pages.size() * record_bytes_;
  if (is_timed) begin_timing();
  device_.wait(copied);
  if (is_timed) device_.record(has_);
  buffers_.release(fetch);
  return Status::ok();
}

/// Of this load; takes the time of the one before, which is kTimedEvery loads old.
void DeviceLoadStaging::begin_timing() {
  if (published_ > 1) {
    ++timed_;
    timed_wait_seconds_ += device_.seconds_between(needs_, has_);
  }
  device_.record(needs_);
}

SpaceCounters DeviceLoadStaging::counters() const {
  SpaceCounters counters = counters_;
  counters.copy_seconds = buffers_.copy_seconds();
  if (timed_ > 0) {
    counters.device_wait_seconds =
        timed_wait_seconds_ * static_cast<double>(published_) / static_cast<double>(timed_);
  }
  return counters;
}

}  // namespace kvswap
