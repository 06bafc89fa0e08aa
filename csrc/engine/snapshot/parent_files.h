#pragma once

#include <cstdint>
#include <vector>

#include "io/layered_file.h"
#include "store/saved_records.h"

namespace kvswap {

/// The files below a session's own: what it continues. Read-only, and perhaps other sessions' too.
struct ParentFiles {
  std::vector<LayeredFile::Part> parts;  // rising
  int64_t end_bytes = 0;                 // past the last record
  int64_t record_bytes = 0;
  std::vector<SeedRange> seeds;  // rising
  int64_t groups = 0;            // of each layer and sequence
};

/// What a session that is saved holds, in numbers; the rest is tensors.
struct SavedCounts {
  int64_t sequences = 0;
  int64_t positions = 0;
  int64_t groups = 0;   // sealed, of each layer and sequence
  int64_t records = 0;  // sequences that share a past share records
  int64_t record_bytes = 0;
  uint64_t seed = 0;  // of the records' checksums
};

}  // namespace kvswap
