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
  const bool is_timed = until_timed_ == 0;
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
  if (is_timed) KVSWAP_RETURN_IF_ERROR(begin_timing());
  device_.wait(copied);
  if (is_timed) device_.record(has_);
  --until_timed_;
  buffers_.release(fetch);
  return Status::ok();
}

/// Of this load; takes the time of the one before, which is some loads old: done, as a rule.
Status DeviceLoadStaging::begin_timing() {
  if (timed_stands_for_ > 0) {
    KVSWAP_RETURN_IF_ERROR(device_.synchronize(has_));
    counters_.device_wait_seconds +=
        static_cast<double>(timed_stands_for_) * device_.seconds_between(needs_, has_);
  }
  // Five to nine loads in turn, so that it is another layer's each time.
  timed_stands_for_ = timed_stands_for_ % 9 == 0 ? 5 : timed_stands_for_ + 1;
  until_timed_ = timed_stands_for_;
  device_.record(needs_);
  return Status::ok();
}

SpaceCounters DeviceLoadStaging::counters() const {
  SpaceCounters counters = counters_;
  counters.copy_seconds = buffers_.copy_seconds();
  return counters;
}

}  // namespace kvswap
