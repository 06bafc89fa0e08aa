#include "engine/device_outbox.h"

namespace kvswap {

Status DeviceOutbox::open() {
  std::vector<Event*> events = {&sealed_};
  for (Event& event : sent_) events.push_back(&event);
  KVSWAP_RETURN_IF_ERROR(make_events(device_, events));
  const auto bytes = static_cast<int64_t>(staging_.size());
  KVSWAP_RETURN_IF_ERROR(device_.pin(staging_.data(), bytes));
  is_pinned_ = true;
  auto memory = DeviceBytes::allocate(device_, bytes);
  if (!memory.is_ok()) return memory.status();
  memory_ = std::move(memory.value());
  return Status::ok();
}

void DeviceOutbox::close() {
  if (is_pinned_) device_.unpin(staging_.data(), static_cast<int64_t>(staging_.size()));
  is_pinned_ = false;
}

std::byte* DeviceOutbox::at(const RecordStore::StagedRun& run) {
  return memory_.data() + (run.data() - staging_.data());
}

/// A run without a buffer would record an event that is none.
Event DeviceOutbox::sent_of(const RecordStore::StagedRun& run) const {
  KVSWAP_ASSERT(run.buffer.index >= 0 && run.buffer.index < static_cast<int>(std::size(sent_)));
  return sent_[run.buffer.index];
}

Outbox::Sent DeviceOutbox::send(const RecordStore::StagedRun& run, int64_t bytes) {
  device_.record(sealed_);
  const Device::On write(device_, Stream::kWrite);
  device_.wait(sealed_);
  device_.copy_out(run.data(), at(run), bytes);
  device_.record(sent_of(run));
  return Sent::kOnItsWay;
}

Status DeviceOutbox::arrive(const RecordStore::StagedRun& run) {
  return device_.synchronize(sent_of(run));
}

}  // namespace kvswap
