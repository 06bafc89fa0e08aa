#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <memory_resource>
#include <span>
#include <vector>

#include "io/data_file.h"
#include "io/kept_memory.h"
#include "io/write_queue.h"
#include "store/layout.h"
#include "store/saved_records.h"

namespace kvswap {

/// Names a sealed record for as long as it lives; a later record never has the same key, even in
/// the same place of the file.
using RecordKey = uint64_t;

struct RecordStoreOptions {
  int64_t layers = 0;
  int64_t payload_bytes = 0;  // of one record; the rest up to record_bytes is zeros
  int64_t note_bytes = 0;     // kept in memory with each record, beside its checksum
  bool checksum = true;
  uint64_t seed = 0;        // of this session: no other session's records pass verify()
  int64_t begin_bytes = 0;  // where its own file begins, above those of what it continues
  std::vector<SeedRange> seeds_below = {};  // of those files' records
};

/// Groups to and from the file: sealed records, reached through a table per layer and sequence.
///
/// A record is immutable once committed and counted by the tables that hold it: sequences that
/// share a past share its records, and its space is used again when the last table drops it.
/// Committed bytes reach the file in order behind the caller's back; ensure_written() waits for
/// one record. Checksums (XXH3, seeded with session, layer, group and record) sit in memory.
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
    std::vector<Entry> entries;  // [count] once entered
    std::vector<int8_t> notes;   // [count, note_bytes]: to be filled before hand_over()
    std::byte* data() const { return buffer.data; }
  };

  static Result<std::unique_ptr<RecordStore>> create(DataFile* file, std::unique_ptr<Layout> layout,
                                                     const RecordStoreOptions& options,
                                                     const WriteQueueOptions& write_options);

  int64_t record_bytes() const { return layout_->record_bytes(); }
  /// Most records that one run can stage.
  int64_t run_records_max() const { return buffer_bytes_ / record_bytes(); }

  /// Lends room for `count` records; blocks while the disk is behind.
  Result<StagedRun> stage(int64_t layer, int64_t count);
  /// Seals the run: record i becomes the next group of `sequences[i]` in its layer, also when the
  /// hand-over to the disk fails; truncate() takes that back. Both of what follows.
  Status commit(StagedRun& run, std::span<const int64_t> sequences);
  /// The tables get the records. Their bytes may still be on their way to the run: until
  /// hand_over() nothing of it may be read, verified or truncated.
  void enter(StagedRun& run, std::span<const int64_t> sequences);
  /// The bytes are there: sums them up and hands them to the disk.
  Status hand_over(const StagedRun& run);

  int64_t groups(int64_t layer, int64_t sequence) const;
  RecordKey key(int64_t layer, int64_t sequence, int64_t group) const;
  int64_t offset_bytes(int64_t layer, int64_t sequence, int64_t group) const;
  /// What was noted of a record: [note_bytes].
  void copy_note(int64_t layer, int64_t sequence, int64_t group, int8_t* target) const;
  /// Waits until the record's bytes are in the file.
  Status ensure_written(int64_t layer, int64_t sequence, int64_t group);
  /// True when `bytes` (payload and padding) are what was committed; always, without checksums.
  bool verify(int64_t layer, int64_t sequence, int64_t group, const std::byte* bytes) const;

  /// Frees the records of a table's groups before `end`, for good: what is said above of a
  /// group holds from first_group() on. groups() stays.
  void drop(int64_t layer, int64_t sequence, int64_t end);
  int64_t first_group(int64_t layer, int64_t sequence) const {
    return tables_[layer][sequence].first;
  }
  /// Drops the groups from `groups` on in a layer, of all sequences. Writes that are not done and
  /// that no table holds any more are dropped, too: so is what failed of them.
  void truncate(int64_t layer, int64_t groups);
  void set_sequences(int64_t sequences);
  /// Table i of the new batch shares the records of table indices[i] of the old one.
  void select_sequences(std::span<const int64_t> indices);
  void clear();
  /// For a store that is about to close: nobody will read what is not written yet.
  void forget_writes();

  // For a session that is saved, or continues a saved one.

  /// Fills the tables of a store that has none yet, and sequences set.
  void restore(const SavedTables& saved);
  /// The records that tables hold, in the order of their numbers; renumbered[record] is the place
  /// of a record in that order.
  std::vector<SavedRecord> live_records(std::vector<uint32_t>& renumbered) const;
  /// Their notes, in the same order: [records, note_bytes].
  std::vector<int8_t> live_notes() const;
  /// The number of a sealed group's record: what tables hold.
  uint32_t number(int64_t layer, int64_t sequence, int64_t group) const {
    return tables_[layer][sequence].at(group);
  }
  /// How a record sums up in a file of its own, under another seed and serial.
  uint32_t sum(const std::byte* bytes, int64_t layer, int64_t group, uint32_t serial,
               uint64_t seed) const;
  /// Do all records stand in the own file?
  bool is_alone() const;
  /// Calls with offset and length for each part of the own file that holds no record.
  void each_hole(const std::function<void(int64_t, int64_t)>& hole);
  /// One past the last byte in use of the own file; what is before is never written again.
  int64_t end_bytes() const { return begin_bytes_ + layout_->end_bytes(); }
  uint64_t seed() const { return seeds_.back().seed; }
  const std::vector<SeedRange>& seeds() const { return seeds_; }
  /// From here on records go to another file, which begins at begin_bytes.
  void begin_file(int64_t begin_bytes, uint64_t seed);

  /// Bytes of tables for one more group of one sequence in one layer, beside its note.
  static constexpr int64_t table_bytes_per_group() { return sizeof(Record) + sizeof(uint32_t); }
  int64_t staging_bytes() const { return queue_->resident_bytes(); }
  /// All buffers that stage() lends; buffer i begins at i times its length.
  std::span<std::byte> staging() const { return queue_->memory(); }
  uint64_t bytes_written() const { return queue_->bytes_written(); }
  double write_blocked_seconds() const { return queue_->blocked_seconds(); }
  /// Of all records that tables hold.
  int64_t bytes_held() const { return live_records_ * record_bytes(); }
  Status flush();

 private:
  struct Record {
    uint32_t place = 0;  // offset / record_bytes
    uint32_t serial = 0;
    uint32_t checksum = 0;
    uint32_t references = 0;
  };
  /// A record in its place as long as the serial is the same.
  struct RecordOnce {
    uint32_t index = 0;
    uint32_t serial = 0;
  };
  struct PendingWrite {
    uint64_t number = 0;
    int64_t begin_bytes = 0;
    int64_t end_bytes = 0;
    std::vector<RecordOnce> records;
  };
  /// Of one layer and sequence.
  struct Table {
    int64_t first = 0;  // groups before this one have no records any more
    // A deque grows without the copy (and the doubled memory) of a vector.
    std::pmr::deque<uint32_t> numbers;  // [groups - first]: index into records_

    explicit Table(std::pmr::memory_resource* memory) : numbers(memory) {}
    Table(const Table& other, std::pmr::memory_resource* memory)
        : first(other.first), numbers(other.numbers, memory) {}
    int64_t groups() const { return first + static_cast<int64_t>(numbers.size()); }
    uint32_t at(int64_t group) const { return numbers.at(group - first); }
  };

  RecordStore(DataFile* file, std::unique_ptr<Layout> layout, const RecordStoreOptions& options,
              std::unique_ptr<WriteQueue> queue, int64_t buffer_bytes);

  Result<int64_t> place(int64_t layer, int64_t count);
  const Record& record(int64_t layer, int64_t sequence, int64_t group) const;
  uint64_t seed_of(const Record& record) const;
  uint32_t add_record(const Record& record);
  void let_go(uint32_t index);
  void forget_written();
  void drop_unread_writes();

  DataFile* file_;
  std::unique_ptr<Layout> layout_;
  RecordStoreOptions options_;
  int64_t begin_bytes_;           // of the own file
  std::vector<SeedRange> seeds_;  // the own file's last
  std::unique_ptr<WriteQueue> queue_;
  int64_t buffer_bytes_;
  std::unique_ptr<std::pmr::memory_resource> kept_ = make_kept_memory();  // the tables'
  std::vector<std::vector<Table>> tables_;                                // [layers][sequences]
  std::pmr::deque<Record> records_{kept_.get()};
  std::pmr::deque<int8_t> notes_{kept_.get()};  // [records_, note_bytes]
  std::vector<uint32_t> unused_records_;
  std::deque<PendingWrite> pending_;
  uint32_t next_serial_ = 1;
  int64_t live_records_ = 0;
  uint64_t last_write_ = 0;
};

}  // namespace kvswap
