#include "store/record_registry.h"

#include <algorithm>

#include "io/status.h"

namespace kvswap {

uint32_t RecordRegistry::add(uint32_t place) {
  ++held_;
  const Record record = {.place = place, .serial = next_serial_++, .holders = 1};
  if (unused_.empty()) {
    records_.push_back(record);
    notes_.resize(records_.size() * note_bytes_);
    return static_cast<uint32_t>(records_.size() - 1);
  }
  const uint32_t number = unused_.back();
  unused_.pop_back();
  records_[number] = record;
  return number;
}

bool RecordRegistry::release(uint32_t number) {
  Record& record = records_[number];
  KVSWAP_ASSERT(record.holders > 0);
  if (--record.holders > 0) return false;
  --held_;
  unused_.push_back(number);
  return true;
}

void RecordRegistry::set_note(uint32_t number, const int8_t* note) {
  std::copy_n(note, note_bytes_, notes_.begin() + number * note_bytes_);
}

void RecordRegistry::copy_note(uint32_t number, int8_t* target) const {
  if (note_bytes_ == 0) return;
  std::copy_n(notes_.begin() + number * note_bytes_, note_bytes_, target);
}

bool RecordRegistry::stand_from(int64_t place) const {
  return std::ranges::all_of(records_, [place](const Record& record) {
    return record.holders == 0 || record.place >= place;
  });
}

void RecordRegistry::clear() {
  records_.clear();
  notes_.clear();
  unused_.clear();
  held_ = 0;
}

void RecordRegistry::restore(const SavedTables& saved) {
  KVSWAP_ASSERT(records_.empty());
  for (const SavedRecord& record : saved.records) {
    records_.push_back({record.place, record.serial, record.checksum, 0});
    next_serial_ = std::max(next_serial_, record.serial + 1);
  }
  KVSWAP_ASSERT(saved.notes.size() == records_.size() * note_bytes_);
  notes_.assign(saved.notes.begin(), saved.notes.end());
}

void RecordRegistry::end_restore() {
  for (uint32_t number = 0; number < records_.size(); ++number) {
    if (records_[number].holders == 0) unused_.push_back(number);
  }
}

std::vector<SavedRecord> RecordRegistry::held_records(std::vector<uint32_t>& renumbered) const {
  std::vector<SavedRecord> held;
  held.reserve(held_);
  renumbered.assign(records_.size(), 0);
  for (size_t number = 0; number < records_.size(); ++number) {
    const Record& record = records_[number];
    if (record.holders == 0) continue;
    renumbered[number] = static_cast<uint32_t>(held.size());
    held.push_back({record.place, record.serial, record.checksum});
  }
  return held;
}

std::vector<int8_t> RecordRegistry::held_notes() const {
  std::vector<int8_t> held;
  held.reserve(held_ * note_bytes_);
  for (size_t number = 0; number < records_.size(); ++number) {
    if (records_[number].holders == 0) continue;
    const auto note = notes_.begin() + static_cast<int64_t>(number) * note_bytes_;
    held.insert(held.end(), note, note + note_bytes_);
  }
  return held;
}

}  // namespace kvswap
