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
      queue_(std::move(queue)),
      buffer_bytes_(buffer_bytes),
      tables_(options.layers) {}

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
  return StagedRun{buffer.value(), layer, offset.value(), count, {}};
}

Result<int64_t> RecordStore::place(int64_t layer, int64_t count) {
  const int64_t offset = layout_->place(layer, count);
  const bool has_numbers =
      layout_->end_bytes() / record_bytes() <= std::numeric_limits<uint32_t>::max();
  const Status reserved =
      has_numbers
          ? file_->reserve(layout_->end_bytes())
          : Status::budget("record store: a session's file must hold fewer than 2^32 records");
  if (reserved.is_ok()) return offset;
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
    run.entries.push_back({index, static_cast<int64_t>(table.size())});
    table.push_back(index);
  }
}

Status RecordStore::hand_over(const StagedRun& run) {
  KVSWAP_ASSERT(static_cast<int64_t>(run.entries.size()) == run.count);
  for (int64_t i = 0; i < run.count; ++i) {
    std::byte* bytes = run.data() + i * record_bytes();
    std::memset(bytes + options_.payload_bytes, 0, record_bytes() - options_.payload_bytes);
    if (!options_.checksum) continue;
    Record& record = records_[run.entries[i].record];
    record.checksum = checksum(bytes, run.layer, run.entries[i].group, record.serial);
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

uint32_t RecordStore::checksum(const std::byte* bytes, int64_t layer, int64_t group,
                               uint32_t serial) const {
  const std::array<uint64_t, 4> identity = {options_.seed, static_cast<uint64_t>(layer),
                                            static_cast<uint64_t>(group), serial};
  const uint64_t seed = XXH3_64bits(identity.data(), sizeof(identity));
  return static_cast<uint32_t>(XXH3_64bits_withSeed(bytes, record_bytes(), seed));
}

uint32_t RecordStore::add_record(const Record& record) {
  ++live_records_;
  if (unused_records_.empty()) {
    records_.push_back(record);
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
  layout_->release(record.place * record_bytes());
  unused_records_.push_back(index);
}

int64_t RecordStore::groups(int64_t layer, int64_t sequence) const {
  return static_cast<int64_t>(tables_.at(layer).at(sequence).size());
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
  return checksum(bytes, layer, group, expected.serial) == expected.checksum;
}

void RecordStore::truncate(int64_t layer, int64_t groups) {
  for (Table& table : tables_.at(layer)) {
    while (static_cast<int64_t>(table.size()) > groups) {
      let_go(table.back());
      table.pop_back();
    }
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
      for (const uint32_t shared : selected.back()) ++records_[shared].references;
    }
    for (const Table& table : layer) {
      for (const uint32_t dropped : table) let_go(dropped);
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
  unused_records_.clear();
  layout_->clear();
  live_records_ = 0;
}

Status RecordStore::flush() { return last_write_ == 0 ? Status::ok() : queue_->wait(last_write_); }

}  // namespace kvswap
