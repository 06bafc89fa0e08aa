#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "io/data_file.h"
#include "io/status.h"
#include "store/layout.h"
#include "store/saved_records.h"

namespace kvswap {

/// Where records stand: a session's own file, by its Layout, above the files of what it continues;
/// and under which session's seed each place was written. Not thread-safe.
class RecordLocations {
 public:
  /// seeds_below: of the files below begin_bytes, where the own one begins. The file must outlive
  /// this.
  RecordLocations(DataFile* file, std::unique_ptr<Layout> layout, int64_t begin_bytes,
                  uint64_t seed, std::vector<SeedRange> seeds_below);

  /// Of each record, padding included.
  int64_t record_bytes() const { return layout_->record_bytes(); }
  /// Offset of these neighbouring records, for which the file has room from now on.
  Result<int64_t> take(const PlaceArgs& args);
  /// See Layout; offsets as take() gave them.
  bool has_room_beside(std::span<const int64_t> offsets, int64_t count) const;
  /// Nobody reads this record any more; one below the own file stays where it is.
  void release(uint32_t place);
  /// Nobody reads any of the own file.
  void clear();

  int64_t offset_bytes(uint32_t place) const { return place * record_bytes(); }
  /// One past the last byte in use of the own file; what is before is never written again.
  int64_t end_bytes() const { return begin_bytes_ + layout_->end_bytes(); }
  /// Where the own file begins.
  int64_t first_place() const { return begin_bytes_ / record_bytes(); }
  /// Of the session that wrote the record.
  uint64_t seed_of(uint32_t place) const;
  uint64_t seed() const { return seeds_.back().seed; }
  const std::vector<SeedRange>& seeds() const { return seeds_; }
  /// Calls with offset and length for each part of the own file that holds no record.
  void each_hole(const std::function<void(int64_t, int64_t)>& hole);
  /// From here on records go to another file, which begins at begin_bytes.
  void begin_file(int64_t begin_bytes, uint64_t seed);

 private:
  Result<int64_t> place(const PlaceArgs& args);
  std::vector<int64_t> in_layout(std::span<const int64_t> offsets) const;

  DataFile* file_;
  std::unique_ptr<Layout> layout_;
  int64_t begin_bytes_;           // of the own file
  std::vector<SeedRange> seeds_;  // the own file's last
};

}  // namespace kvswap
