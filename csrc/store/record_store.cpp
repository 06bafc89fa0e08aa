#include "store/record_store.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvswap {

Result<std::unique_ptr<RecordStore>> RecordStore::create(DataFile* file,
                                                         std::unique_ptr<Layout> layout,
                                                         const RecordStoreOptions& options,
                                                         const WriteQueueOptions& write_options) {
  KVSWAP_ASSERT(write_options.buffer_bytes >= layout->record_bytes());
  auto queue = WriteQueue::create(file, write_options);
  if (!queue.is_ok()) return queue.status();
  return std::unique_ptr<RecordStore>(new RecordStore(
      file, std::move(layout), options, std::move(queue.value()), write_options.buffer_bytes));
}

RecordStore::RecordStore(DataFile* file, std::unique_ptr<Layout> layout,
                         const RecordStoreOptions& options, std::unique_ptr<WriteQueue> queue,
                         int64_t buffer_bytes)
    : file_(file),
      layout_(std::move(layout)),
      options_(options),
      begin_bytes_(options.begin_bytes),
      seeds_(options.seeds_below),
      queue_(std::move(queue)),
      buffer_bytes_(buffer_bytes),
      tables_(options.layers) {
  KVSWAP_ASSERT(begin_bytes_ % record_bytes() == 0);
  seeds_.push_back({begin_bytes_ / record_bytes(), options.seed});
}

Result<RecordStore::StagedRun> RecordStore::stage(int64_t layer, int64_t count) {
  KVSWAP_ASSERT(count > 0 && count <= run_records_max());
  auto buffer = queue_->acquire();
  if (!buffer.is_ok()) return buffer.status();
  auto offset = place(layer, count);
  if (!offset.is_ok()) {
    // Near the disk's or the quota's end what was taken ahead is worth more as room.
    layout_->tighten();
    offset = place(layer, count);
  }
  if (!offset.is_ok()) {
    queue_->give_back(buffer.value());
    return offset.status();
  }
  return StagedRun{buffer.value(), layer, offset.value(),
                   count,          {},    std::vector<int8_t>(count * options_.note_bytes)};
}

Result<int64_t> RecordStore::place(int64_t layer, int64_t count) {
  const int64_t offset = layout_->place(layer, count);
  const bool has_numbers = end_bytes() / record_bytes() <= std::numeric_limits<uint32_t>::max();
  const Status reserved =
      has_numbers
          ? file_->reserve(end_bytes())
          : Status::budget("record store: a session's file must hold fewer than 2^32 records");
  if (reserved.is_ok()) return begin_bytes_ + offset;
  for (int64_t i = 0; i < count; ++i) layout_->release(offset + i * record_bytes());
  return reserved;
}

Status RecordStore::commit(StagedRun& run, std::span<const int64_t> sequences) {
  enter(run, sequences);
  return hand_over(run);
}

void RecordStore::enter(StagedRun& run, std::span<const int64_t> sequences) {
  KVSWAP_ASSERT(static_cast<int64_t>(sequences.size()) == run.count);
  run.entries.clear();
  for (int64_t i = 0; i < run.count; ++i) {
    Table& table = tables_.at(run.layer).at(sequences[i]);
    Record record;
    record.place = static_cast<uint32_t>(run.offset_bytes / record_bytes() + i);
    record.serial = next_serial_++;
    record.references = 1;
    const uint32_t index = add_record(record);
    run.entries.push_back({index, table.groups()});
    table.numbers.push_back(index);
  }
}

Status RecordStore::hand_over(const StagedRun& run) {
  KVSWAP_ASSERT(static_cast<int64_t>(run.entries.size()) == run.count);
  for (int64_t i = 0; i < run.count; ++i) {
    std::copy_n(run.notes.begin() + i * options_.note_bytes, options_.note_bytes,
                notes_.begin() + run.entries[i].record * options_.note_bytes);
    std::byte* bytes = run.data() + i * record_bytes();
    std::memset(bytes + options_.payload_bytes, 0, record_bytes() - options_.payload_bytes);
    if (!options_.checksum) continue;
    Record& record = records_[run.entries[i].record];
    record.checksum = sum(bytes, run.layer, run.entries[i].group, record.serial, seed());
  }
  const int64_t length = run.count * record_bytes();
  auto number = queue_->submit(run.buffer, run.offset_bytes, length);
  if (!number.is_ok()) return number.status();
  last_write_ = number.value();
  PendingWrite write = {last_write_, run.offset_bytes, run.offset_bytes + length, {}};
  for (const StagedRun::Entry& entry : run.entries) {
    write.records.push_back({entry.record, records_[entry.record].serial});
  }
  pending_.push_back(std::move(write));
  forget_written();
  return Status::ok();
}

void RecordStore::forget_written() {
  const uint64_t written = queue_->written();
  while (!pending_.empty() && pending_.front().number <= written) pending_.pop_front();
}

void RecordStore::drop_unread_writes() {
  forget_written();
  // The newest first: see WriteQueue::drop().
  for (auto write = pending_.rbegin(); write != pending_.rend(); ++write) {
    const bool is_read = std::ranges::any_of(write->records, [this](const RecordOnce& once) {
      const Record& record = records_[once.index];
      return record.references > 0 && record.serial == once.serial;
    });
    if (!is_read) queue_->drop(write->number);
  }
}

uint32_t RecordStore::sum(const std::byte* bytes, int64_t layer, int64_t group, uint32_t serial,
                          uint64_t seed) const {
  const std::array<uint64_t, 4> identity = {seed, static_cast<uint64_t>(layer),
                                            static_cast<uint64_t>(group), serial};
  const uint64_t mixed = XXH3_64bits(identity.data(), sizeof(identity));
  return static_cast<uint32_t>(XXH3_64bits_withSeed(bytes, record_bytes(), mixed));
}

uint64_t RecordStore::seed_of(const Record& record) const {
  auto range = seeds_.rbegin();
  while (record.place < range->place) ++range;
  return range->seed;
}

uint32_t RecordStore::add_record(const Record& record) {
  ++live_records_;
  if (unused_records_.empty()) {
    records_.push_back(record);
    notes_.resize(records_.size() * options_.note_bytes);
    return static_cast<uint32_t>(records_.size() - 1);
  }
  const uint32_t index = unused_records_.back();
  unused_records_.pop_back();
  records_[index] = record;
  return index;
}

void RecordStore::let_go(uint32_t index) {
  Record& record = records_[index];
  KVSWAP_ASSERT(record.references > 0);
  if (--record.references > 0) return;
  --live_records_;
  const int64_t offset = record.place * record_bytes();
  if (offset >= begin_bytes_) {
    layout_->release(offset - begin_bytes_);
    file_->discard(offset, record_bytes());
  }
  unused_records_.push_back(index);
}

int64_t RecordStore::groups(int64_t layer, int64_t sequence) const {
  return tables_.at(layer).at(sequence).groups();
}

const RecordStore::Record& RecordStore::record(int64_t layer, int64_t sequence,
                                               int64_t group) const {
  return records_[tables_[layer][sequence].at(group)];
}

RecordKey RecordStore::key(int64_t layer, int64_t sequence, int64_t group) const {
  const Record& found = record(layer, sequence, group);
  return (static_cast<uint64_t>(found.serial) << 32) | found.place;
}

int64_t RecordStore::offset_bytes(int64_t layer, int64_t sequence, int64_t group) const {
  return record(layer, sequence, group).place * record_bytes();
}

void RecordStore::copy_note(int64_t layer, int64_t sequence, int64_t group, int8_t* target) const {
  if (options_.note_bytes == 0) return;
  std::copy_n(notes_.begin() + number(layer, sequence, group) * options_.note_bytes,
              options_.note_bytes, target);
}

Status RecordStore::ensure_written(int64_t layer, int64_t sequence, int64_t group) {
  if (pending_.empty()) return Status::ok();
  forget_written();
  const int64_t offset = offset_bytes(layer, sequence, group);
  for (const PendingWrite& write : pending_) {
    if (offset >= write.begin_bytes && offset < write.end_bytes) {
      KVSWAP_RETURN_IF_ERROR(queue_->wait(write.number));
    }
  }
  return Status::ok();
}

bool RecordStore::verify(int64_t layer, int64_t sequence, int64_t group,
                         const std::byte* bytes) const {
  if (!options_.checksum) return true;
  const Record& expected = record(layer, sequence, group);
  return sum(bytes, layer, group, expected.serial, seed_of(expected)) == expected.checksum;
}

void RecordStore::drop(int64_t layer, int64_t sequence, int64_t end) {
  Table& table = tables_.at(layer).at(sequence);
  KVSWAP_ASSERT(end <= table.groups());
  for (; table.first < end; ++table.first) {
    let_go(table.numbers.front());
    table.numbers.pop_front();
  }
}

void RecordStore::truncate(int64_t layer, int64_t groups) {
  for (Table& table : tables_.at(layer)) {
    while (!table.numbers.empty() && table.groups() > groups) {
      let_go(table.numbers.back());
      table.numbers.pop_back();
    }
    table.first = std::min(table.first, groups);
  }
  drop_unread_writes();
}

void RecordStore::set_sequences(int64_t sequences) {
  for (auto& layer : tables_) {
    KVSWAP_ASSERT(layer.empty());
    layer.reserve(sequences);
    for (int64_t i = 0; i < sequences; ++i) layer.emplace_back(kept_.get());
  }
}

void RecordStore::select_sequences(std::span<const int64_t> indices) {
  for (auto& layer : tables_) {
    std::vector<Table> selected;
    selected.reserve(indices.size());
    for (const int64_t index : indices) {
      selected.emplace_back(layer.at(index), kept_.get());
      for (const uint32_t shared : selected.back().numbers) ++records_[shared].references;
    }
    for (const Table& table : layer) {
      for (const uint32_t dropped : table.numbers) let_go(dropped);
    }
    layer = std::move(selected);
  }
  drop_unread_writes();
}

void RecordStore::forget_writes() {
  queue_->forget();
  pending_.clear();
  last_write_ = 0;
}

void RecordStore::clear() {
  forget_writes();
  for (auto& layer : tables_) layer.clear();
  records_.clear();
  notes_.clear();
  unused_records_.clear();
  file_->discard(begin_bytes_, layout_->end_bytes());
  layout_->clear();
  live_records_ = 0;
}

void RecordStore::restore(const SavedTables& saved) {
  KVSWAP_ASSERT(records_.empty() && saved.tables.size() == tables_.size());
  for (const SavedRecord& record : saved.records) {
    KVSWAP_ASSERT(record.place < seeds_.back().place);
    records_.push_back({record.place, record.serial, record.checksum, 0});
    next_serial_ = std::max(next_serial_, record.serial + 1);
  }
  KVSWAP_ASSERT(saved.notes.size() == records_.size() * options_.note_bytes);
  notes_.assign(saved.notes.begin(), saved.notes.end());
  for (size_t layer = 0; layer < tables_.size(); ++layer) {
    for (size_t sequence = 0; sequence < tables_[layer].size(); ++sequence) {
      for (const uint32_t number : saved.tables[layer].at(sequence)) {
        tables_[layer][sequence].numbers.push_back(number);
        if (records_.at(number).references++ == 0) ++live_records_;
      }
    }
  }
  for (uint32_t number = 0; number < records_.size(); ++number) {
    if (records_[number].references == 0) unused_records_.push_back(number);
  }
}

std::vector<SavedRecord> RecordStore::live_records(std::vector<uint32_t>& renumbered) const {
  std::vector<SavedRecord> live;
  live.reserve(live_records_);
  renumbered.assign(records_.size(), 0);
  for (size_t number = 0; number < records_.size(); ++number) {
    const Record& record = records_[number];
    if (record.references == 0) continue;
    renumbered[number] = static_cast<uint32_t>(live.size());
    live.push_back({record.place, record.serial, record.checksum});
  }
  return live;
}

std::vector<int8_t> RecordStore::live_notes() const {
  std::vector<int8_t> live;
  live.reserve(live_records_ * options_.note_bytes);
  for (size_t number = 0; number < records_.size(); ++number) {
    if (records_[number].references == 0) continue;
    const auto note = notes_.begin() + number * options_.note_bytes;
    live.insert(live.end(), note, note + options_.note_bytes);
  }
  return live;
}

bool RecordStore::is_alone() const {
  const int64_t first = begin_bytes_ / record_bytes();
  return std::ranges::all_of(records_, [first](const Record& record) {
    return record.references == 0 || record.place >= first;
  });
}

void RecordStore::each_hole(const std::function<void(int64_t, int64_t)>& hole) {
  layout_->close_runs();
  layout_->each_hole([&](int64_t offset, int64_t length) { hole(begin_bytes_ + offset, length); });
}

void RecordStore::begin_file(int64_t begin_bytes, uint64_t seed) {
  KVSWAP_ASSERT(begin_bytes >= end_bytes() && begin_bytes % record_bytes() == 0);
  begin_bytes_ = begin_bytes;
  seeds_.push_back({begin_bytes / record_bytes(), seed});
  layout_->clear();
}

Status RecordStore::flush() { return last_write_ == 0 ? Status::ok() : queue_->wait(last_write_); }

}  // namespace kvswap
