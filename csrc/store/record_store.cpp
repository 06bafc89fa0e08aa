#include "store/record_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "store/checksum.h"

namespace kvswap {
namespace {

/// Where a run's record stands as the file is to have it. Packed ones are neighbours from the run's
/// begin on: none reaches a record that is still to be packed. packed: room for one.
std::byte* as_stored(const RecordForm& form, std::byte* run, int64_t index,
                     std::span<std::byte> packed) {
  std::byte* record = run + index * form.record_bytes;
  if (form.packing == nullptr) return record;
  form.packing->pack(record, packed.data());
  std::byte* target = run + index * form.stored_bytes;
  std::memcpy(target, packed.data(), packed.size());
  return target;
}

}  // namespace

Result<std::unique_ptr<RecordStore>> RecordStore::create(DataFile* file,
                                                         std::unique_ptr<Layout> layout,
                                                         const RecordStoreOptions& options,
                                                         const WriteQueueOptions& write_options) {
  KVSWAP_ASSERT(write_options.buffer_bytes >=
                std::max(options.record_bytes, layout->record_bytes()));
  auto queue = WriteQueue::create(file, write_options);
  if (!queue.is_ok()) return queue.status();
  return std::unique_ptr<RecordStore>(new RecordStore(
      file, std::move(layout), options, std::move(queue.value()), write_options.buffer_bytes));
}

RecordStore::RecordStore(DataFile* file, std::unique_ptr<Layout> layout,
                         const RecordStoreOptions& options, std::unique_ptr<WriteQueue> queue,
                         int64_t buffer_bytes)
    : form_{.record_bytes = options.packing ? options.record_bytes : layout->record_bytes(),
            .stored_bytes = layout->record_bytes(),
            .packing = options.packing},
      packed_(options.packing ? options.payload_bytes : 0),
      payload_bytes_(options.payload_bytes),
      note_bytes_(options.note_bytes),
      has_checksums_(options.checksum),
      buffer_bytes_(buffer_bytes),
      places_(file, std::move(layout), options.begin_bytes, options.seed, options.seeds_below),
      records_(options.note_bytes, kept_.get()),
      tables_(options.layers, records_, kept_.get(),
              [this](uint32_t number) { places_.release(records_.at(number).place); }),
      writes_(std::move(queue), records_) {}

Result<RecordStore::StagedRun> RecordStore::stage(int64_t layer, int64_t count,
                                                  std::optional<int64_t> taken_bytes) {
  KVSWAP_ASSERT(count > 0 && count <= run_records_max());
  auto buffer = writes_.queue().acquire();
  if (!buffer.is_ok()) {
    for (int64_t i = 0; taken_bytes && i < count; ++i) {
      places_.release(static_cast<uint32_t>(*taken_bytes / form_.stored_bytes + i));
    }
    return buffer.status();
  }
  Result<int64_t> offset =
      taken_bytes ? *taken_bytes : places_.take({.layer = layer, .count = count});
  if (!offset.is_ok()) {
    writes_.queue().give_back(buffer.value());
    return offset.status();
  }
  return StagedRun{.buffer = buffer.value(),
                   .layer = layer,
                   .offset_bytes = offset.value(),
                   .count = count,
                   .notes = std::vector<int8_t>(count * note_bytes_)};
}

void RecordStore::enter(StagedRun& run, std::span<const int64_t> sequences) {
  KVSWAP_ASSERT(static_cast<int64_t>(sequences.size()) == run.count);
  const auto first = static_cast<uint32_t>(run.offset_bytes / form_.stored_bytes);
  run.entries.clear();
  for (uint32_t i = 0; i < run.count; ++i) {
    const uint32_t number = records_.add(first + i);
    run.entries.push_back({number, tables_.append(run.layer, sequences[i], number)});
  }
}

void RecordStore::enter_pages(StagedRun& run, std::span<const int64_t> pages) {
  KVSWAP_ASSERT(static_cast<int64_t>(pages.size()) == run.count);
  const auto first = static_cast<uint32_t>(run.offset_bytes / form_.stored_bytes);
  run.entries.clear();
  for (uint32_t i = 0; i < run.count; ++i) {
    run.entries.push_back({records_.add(first + i), pages[i]});
  }
}

Status RecordStore::hand_over(const StagedRun& run) {
  KVSWAP_ASSERT(static_cast<int64_t>(run.entries.size()) == run.count);
  std::vector<RecordWrites::Written> written;
  for (int64_t i = 0; i < run.count; ++i) {
    const auto [number, group] = run.entries[i];
    written.push_back({number, records_.at(number).serial});
    records_.set_note(number, run.notes.data() + i * note_bytes_);
    std::byte* bytes = as_stored(form_, run.data(), i, packed_);
    std::memset(bytes + payload_bytes_, 0, form_.stored_bytes - payload_bytes_);
    if (!has_checksums_) continue;
    const RecordOf of = {places_.seed(), run.layer, group, written.back().serial};
    records_.set_checksum(number,
                          record_checksum({bytes, static_cast<size_t>(form_.stored_bytes)}, of));
  }
  return writes_.submit(run.buffer, run.offset_bytes, run.count * form_.stored_bytes,
                        std::move(written));
}

RecordKey RecordStore::key(int64_t layer, int64_t sequence, int64_t group) const {
  return records_.key(tables_.number(layer, sequence, group));
}

bool RecordStore::verify(int64_t layer, int64_t sequence, int64_t group,
                         const std::byte* bytes) const {
  if (!has_checksums_) return true;
  const RecordRegistry::Record& expected = record(layer, sequence, group);
  const RecordOf of = {places_.seed_of(expected.place), layer, group, expected.serial};
  return record_checksum({bytes, static_cast<size_t>(form_.stored_bytes)}, of) == expected.checksum;
}

void RecordStore::truncate(int64_t layer, int64_t groups) {
  tables_.truncate(layer, groups);
  writes_.drop_unread();
}

void RecordStore::select_sequences(std::span<const int64_t> indices) {
  tables_.select_sequences(indices);
  writes_.drop_unread();
}

void RecordStore::clear() {
  writes_.forget();
  tables_.clear();
  records_.clear();
  places_.clear();
}

void RecordStore::restore(const SavedTables& saved) {
  for (const SavedRecord& record : saved.records) {
    KVSWAP_ASSERT(record.place < places_.first_place());
  }
  records_.restore(saved);
  tables_.restore(saved);
  records_.end_restore();
}

}  // namespace kvswap
