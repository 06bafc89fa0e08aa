#include "engine/backend/load_staging.h"

namespace kvswap {

Status DeviceLoadStaging::open() {
  std::vector<Event*> events;
  for (auto* each : {&needs_, &has_}) {
    for (Event& event : *each) events.push_back(&event);
  }
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
  const auto layer = static_cast<size_t>(fetch.layer);
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
    buffers_.copy(fetch, staging_.data(), on_device);
  }
  counters_.copied_bytes += pages.size() * record_bytes_;
  if (is_wait_timed_[layer]) {
    // A step old: done, as a rule.
    KVSWAP_RETURN_IF_ERROR(device_.synchronize(has_[layer]));
    counters_.device_wait_seconds += device_.seconds_between(needs_[layer], has_[layer]);
  }
  device_.record(needs_[layer]);
  device_.wait(copied);
  device_.record(has_[layer]);
  is_wait_timed_[layer] = true;
  buffers_.release(fetch);
  return Status::ok();
}

SpaceCounters DeviceLoadStaging::counters() const {
  SpaceCounters counters = counters_;
  counters.copy_seconds = buffers_.copy_seconds();
  return counters;
}

}  // namespace kvswap
