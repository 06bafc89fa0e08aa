#include "engine/backend/store_staging.h"

#include <cstring>
#include <iterator>

namespace kvswap {

Status DeviceStoreStaging::open() {
  std::vector<Event*> events = {&sealed_};
  for (Event& event : sent_) events.push_back(&event);
  KVSWAP_RETURN_IF_ERROR(make_events(device_, events));
  const auto bytes = static_cast<int64_t>(staging_.size());
  KVSWAP_RETURN_IF_ERROR(device_.pin(staging_.data(), bytes));
  is_pinned_ = true;
  auto memory = DeviceBytes::allocate(device_, bytes);
  if (!memory.is_ok()) return memory.status();
  memory_ = std::move(memory.value());
  const int64_t note_bytes = std::ssize(sent_) * note_bytes_;
  auto notes = DeviceBytes::allocate(device_, note_bytes);
  if (!notes.is_ok()) return notes.status();
  notes_ = std::move(notes.value());
  auto pinned = PinnedBuffer::allocate(device_, note_bytes);
  if (!pinned.is_ok()) return pinned.status();
  host_notes_ = std::move(pinned.value());
  return Status::ok();
}

void DeviceStoreStaging::close() {
  if (is_pinned_) device_.unpin(staging_.data(), static_cast<int64_t>(staging_.size()));
  is_pinned_ = false;
}

std::byte* DeviceStoreStaging::at(const RecordStore::StagedRun& run) {
  return memory_.data() + (run.data() - staging_.data());
}

/// Where a run's notes begin, here and there.
int64_t DeviceStoreStaging::first_note(const RecordStore::StagedRun& run) const {
  KVSWAP_ASSERT(std::ssize(run.notes) <= note_bytes_);
  return run.buffer.index * note_bytes_;
}

int8_t* DeviceStoreStaging::notes_at(RecordStore::StagedRun& run) {
  return reinterpret_cast<int8_t*>(notes_.data() + first_note(run));
}

/// A run without a buffer would record an event that is none.
Event DeviceStoreStaging::sent_of(const RecordStore::StagedRun& run) const {
  KVSWAP_ASSERT(run.buffer.index >= 0 && run.buffer.index < static_cast<int>(std::size(sent_)));
  return sent_[run.buffer.index];
}

StoreStaging::Sent DeviceStoreStaging::send(const RecordStore::StagedRun& run, int64_t bytes) {
  device_.record(sealed_);
  const Device::On write(device_, Stream::kWrite);
  device_.wait(sealed_);
  device_.copy_out(run.data(), at(run), bytes);
  if (!run.notes.empty()) {
    device_.copy_out(host_notes_.data() + first_note(run), notes_.data() + first_note(run),
                     std::ssize(run.notes));
  }
  device_.record(sent_of(run));
  return Sent::kInFlight;
}

Status DeviceStoreStaging::arrive(RecordStore::StagedRun& run) {
  KVSWAP_RETURN_IF_ERROR(device_.synchronize(sent_of(run)));
  if (!run.notes.empty()) {
    std::memcpy(run.notes.data(), host_notes_.data() + first_note(run), run.notes.size());
  }
  return Status::ok();
}

}  // namespace kvswap
