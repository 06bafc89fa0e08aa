#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <vector>

#include "io/data_file.h"
#include "io/pooled_memory.h"
#include "io/write_queue.h"
#include "store/layout.h"
#include "store/record_locations.h"
#include "store/record_packing.h"
#include "store/record_registry.h"
#include "store/record_tables.h"
#include "store/record_writes.h"
#include "store/saved_records.h"

namespace kvswap {

struct RecordStoreOptions {
  int64_t layers = 0;
  int64_t payload_bytes = 0;  // of one record in the file; the rest up to stored_bytes is zeros
  int64_t record_bytes = 0;   // of one in memory; 0: as in the file
  int64_t note_bytes = 0;     // kept in memory with each record, beside its checksum
  bool checksum = true;
  uint64_t seed = 0;        // of this session: no other session's records pass verify()
  int64_t begin_bytes = 0;  // where its own file begins, above those of what it continues
  std::vector<SeedRange> seeds_below = {};                 // of those files' records
  std::shared_ptr<const RecordPacking> packing = nullptr;  // null: in the file as in memory
};

/// Groups to and from the file: sealed records (RecordRegistry), reached through a table per layer
/// and sequence (RecordTables).
///
/// A record is immutable once sealed and counted by the tables that hold it: sequences that share a
/// past share its records, and its space (RecordLocations) is used again when the last table drops
/// it. Sealed bytes reach the file in order behind the caller's back (RecordWrites);
/// ensure_written() waits for one record. Checksums (XXH3, seeded with session, layer, group and
/// record) of what is in the file sit in memory. Records may be packed there (RecordPacking): who
/// reads one verifies it as it stands, then unpacks it.
///
/// Thread rules: one thread at a time. The file must outlive the store.
class RecordStore {
 public:
  /// Records being filled: `count` neighbours of `record_bytes` each, at `data`.
  struct StagedRun {
    WriteQueue::Buffer buffer;
    int64_t layer = 0;
    int64_t offset_bytes = 0;
    int64_t count = 0;
    struct Entry {
      uint32_t record = 0;
      int64_t group = 0;
    };
    std::vector<Entry> entries = {};  // [count] once entered
    std::vector<int8_t> notes = {};   // [count, note_bytes]: to be filled before hand_over()
    std::byte* data() const { return buffer.data; }
  };

  static Result<std::unique_ptr<RecordStore>> create(DataFile* file, std::unique_ptr<Layout> layout,
                                                     const RecordStoreOptions& options,
                                                     const WriteQueueOptions& write_options);

  const RecordForm& form() const { return form_; }
  /// Most records that one run can stage.
  int64_t run_records_max() const { return buffer_bytes_ / form_.record_bytes; }

  /// Lends room for `count` records; blocks while the disk is behind.
  /// taken_bytes: the offset, where places() have given these records theirs; they are released
  /// where it fails.
  Result<StagedRun> stage(int64_t layer, int64_t count,
                          std::optional<int64_t> taken_bytes = std::nullopt);
  /// Seals the run: record i becomes the next group of `sequences[i]` in its layer. Their bytes may
  /// still be on their way to the run: until hand_over() nothing of it may be read, verified or
  /// truncated.
  void enter(StagedRun& run, std::span<const int64_t> sequences);
  /// The same for pages of these numbers: RecordTables::set_page() puts record i in its table, and
  /// give_up() releases one that no table got.
  void enter_pages(StagedRun& run, std::span<const int64_t> pages);
  /// The bytes are there: packs them where they stand, sums them up and hands them to the disk. The
  /// tables have the records also when that fails; truncate() takes them back.
  Status hand_over(const StagedRun& run);

  RecordKey key(int64_t layer, int64_t sequence, int64_t group) const;
  int64_t offset_bytes(int64_t layer, int64_t sequence, int64_t group) const {
    return places_.offset_bytes(record(layer, sequence, group).place);
  }
  /// What was noted of a record: [note_bytes].
  void copy_note(int64_t layer, int64_t sequence, int64_t group, int8_t* target) const {
    records_.copy_note(tables_.number(layer, sequence, group), target);
  }
  /// Waits until the record's bytes are in the file.
  Status ensure_written(int64_t layer, int64_t sequence, int64_t group) {
    return writes_.wait_for(offset_bytes(layer, sequence, group));
  }
  /// True when `bytes` [stored_bytes] are what is in the file; always, without checksums.
  bool verify(int64_t layer, int64_t sequence, int64_t group, const std::byte* bytes) const;

  /// Drops the groups from `groups` on in a layer, of all sequences. Writes that are not done and
  /// that no table holds any more are dropped, too: so is what failed of them.
  void truncate(int64_t layer, int64_t groups);
  /// Table i of the new batch shares the records of table indices[i] of the old one.
  void select_sequences(std::span<const int64_t> indices);
  void clear();
  /// Of a session that continues a saved one: fills the tables of a store that has none yet, and
  /// sequences set.
  void restore(const SavedTables& saved);

  /// What is said above of a group holds from RecordTables::first_group() on.
  RecordTables& tables() { return tables_; }
  const RecordTables& tables() const { return tables_; }
  const RecordRegistry& records() const { return records_; }
  RecordLocations& places() { return places_; }
  const RecordLocations& places() const { return places_; }
  RecordWrites& writes() { return writes_; }

  /// Of all records that tables hold.
  int64_t bytes_held() const { return records_.held() * form_.stored_bytes; }
  /// Bytes of tables for one more group of one sequence in one layer, beside its note.
  static constexpr int64_t table_bytes_per_group() {
    return sizeof(RecordRegistry::Record) + RecordTables::bytes_per_group();
  }

 private:
  RecordStore(DataFile* file, std::unique_ptr<Layout> layout, const RecordStoreOptions& options,
              std::unique_ptr<WriteQueue> queue, int64_t buffer_bytes);

  const RecordRegistry::Record& record(int64_t layer, int64_t sequence, int64_t group) const {
    return records_.at(tables_.number(layer, sequence, group));
  }

  RecordForm form_;
  std::vector<std::byte> packed_;  // one record
  int64_t payload_bytes_;          // of one in the file
  int64_t note_bytes_;
  bool has_checksums_;
  int64_t buffer_bytes_;
  std::unique_ptr<std::pmr::memory_resource> kept_ = make_pooled_memory();  // of list and tables
  RecordLocations places_;
  RecordRegistry records_;
  RecordTables tables_;
  RecordWrites writes_;
};

}  // namespace kvswap
