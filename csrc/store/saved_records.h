#pragma once

#include <cstdint>
#include <vector>

namespace kvswap {

/// A sealed record of a saved session.
struct SavedRecord {
  uint32_t place = 0;   // its offset in the file, or the stack of files, by record_bytes
  uint32_t serial = 0;  // unlike all others'
  uint32_t checksum = 0;
};

/// From `place` on records are of the session with this seed.
struct SeedRange {
  int64_t place = 0;
  uint64_t seed = 0;
};

/// What a store begins with: records that stand in files below its own.
struct SavedTables {
  std::vector<SavedRecord> records;
  std::vector<int8_t> notes;                               // [records, note_bytes]
  std::vector<std::vector<std::vector<uint32_t>>> tables;  // [layers][sequences][groups]
  std::vector<SeedRange> seeds;                            // rising
  struct Page {
    int64_t id = 0;  // negative
    uint32_t number = 0;
  };
  std::vector<std::vector<std::vector<Page>>> pages = {};  // [layers][sequences]; or none
};

}  // namespace kvswap
