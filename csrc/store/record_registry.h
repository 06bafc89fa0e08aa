#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory_resource>
#include <vector>

#include "store/saved_records.h"

namespace kvswap {

/// Names a sealed record for as long as it lives; a later record never has the same key, even in
/// the same place of the file.
using RecordKey = uint64_t;

/// The sealed records of a session by their number: where each stands, what it sums up to, how many
/// hold it, and what is noted of it. A number is given again when nobody holds its record any more;
/// the serial is never. Not thread-safe.
class RecordRegistry {
 public:
  struct Record {
    uint32_t place = 0;   // offset / record_bytes
    uint32_t serial = 0;  // from 1 on
    uint32_t checksum = 0;
    uint32_t holders = 0;
  };

  /// memory: where they are kept, outlives the list. note_bytes: of each record.
  RecordRegistry(int64_t note_bytes, std::pmr::memory_resource* memory)
      : note_bytes_(note_bytes), records_(memory), notes_(memory) {}

  /// The number of a new record, which one holds.
  uint32_t add(uint32_t place);
  void hold(uint32_t number) {
    if (records_.at(number).holders++ == 0) ++held_;
  }
  /// One holds it less. Is it held by nobody now? Then the number may be given again.
  bool release(uint32_t number);
  const Record& at(uint32_t number) const { return records_[number]; }
  RecordKey key(uint32_t number) const {
    return uint64_t{records_[number].serial} << 32 | records_[number].place;
  }
  /// Is it the same record as when it had that serial, and held?
  bool is_held(uint32_t number, uint32_t serial) const {
    return records_[number].holders > 0 && records_[number].serial == serial;
  }
  void set_checksum(uint32_t number, uint32_t checksum) { records_[number].checksum = checksum; }
  /// note: [note_bytes]
  void set_note(uint32_t number, const int8_t* note);
  void copy_note(uint32_t number, int8_t* target) const;

  /// How many are held.
  int64_t held() const { return held_; }
  /// Do all that are held stand from this place on?
  bool stand_from(int64_t place) const;
  /// Forgets all of them.
  void clear();

  // For a session that is saved, or continues a saved one.

  /// Of a list that is empty: held by nobody yet, and numbered in their order. hold() follows, and
  /// end_restore().
  void restore(const SavedTables& saved);
  /// The numbers of those that nobody holds may be given.
  void end_restore();
  /// Those that are held, in the order of their numbers; renumbered[number] is the place of a
  /// record in that order.
  std::vector<SavedRecord> held_records(std::vector<uint32_t>& renumbered) const;
  /// Their notes, in the same order: [records, note_bytes].
  std::vector<int8_t> held_notes() const;

 private:
  int64_t note_bytes_;
  std::pmr::deque<Record> records_;
  std::pmr::deque<int8_t> notes_;  // [records_, note_bytes]
  std::vector<uint32_t> unused_;   // numbers
  uint32_t next_serial_ = 1;
  int64_t held_ = 0;
};

}  // namespace kvswap
