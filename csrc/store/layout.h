#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "io/status.h"
#include "store/extent_allocator.h"

namespace kvswap {

/// What records are placed for.
enum class PlaceFor { kGroups, kClusterPages, kPool };

/// Neighbours that are to be placed.
struct PlaceArgs {
  int64_t layer = 0;
  int64_t count = 0;
  PlaceFor purpose = PlaceFor::kGroups;
  std::span<const int64_t> beside = {};   // offsets of the cluster's records that stay
  std::span<const int64_t> instead = {};  // and of those that go once these are there
};

/// Where records stand in the file: the part that decides which of them are neighbours.
///
/// A unit's record has a fixed padded size within one layout. A layout whose units could not be
/// aligned without multiplying their size is refused at creation, never padded silently.
/// Not thread-safe.
class Layout {
 public:
  virtual ~Layout() = default;
  /// Bytes a record occupies: its payload, padded to the file's alignment.
  virtual int64_t record_bytes() const = 0;
  /// Their offset, where there has_room_beside() those that stay.
  virtual int64_t place(const PlaceArgs& args) = 0;
  /// Can so many records be placed that all of a cluster's are neighbours, these among them? With
  /// none to place: are they? Of a layout that promises no neighbours: always.
  virtual bool has_room_beside(std::span<const int64_t> /*offsets*/, int64_t /*count*/) const {
    return true;
  }
  virtual void release(int64_t offset_bytes) = 0;
  /// What the file must be able to hold.
  virtual int64_t end_bytes() const = 0;
  /// Gives back what was taken ahead of need.
  virtual void close_runs() = 0;
  /// The same, and takes nothing ahead until clear().
  virtual void tighten() = 0;
  virtual void clear() = 0;
  /// Calls with offset and length for each range before end_bytes() that is not in use.
  virtual void each_hole(const std::function<void(int64_t, int64_t)>& hole) const = 0;
};

inline constexpr int64_t kRunRecords = 64;

/// Records in the order in which they are sealed, so that neighbours in the text are neighbours on
/// disk. Single groups sealed while decoding come from an open run of each layer (`run_records`
/// long at most), so that they stand together, too.
class SequenceLayout final : public Layout {
 public:
  /// Refuses a payload that padding to `alignment_bytes` would more than double.
  static Result<std::unique_ptr<Layout>> create(int64_t payload_bytes, int64_t alignment_bytes,
                                                int64_t layers, int64_t run_records = kRunRecords);
  /// Records that go on after some of `record_bytes` that are saved.
  static std::unique_ptr<Layout> continuing(int64_t record_bytes, int64_t layers,
                                            int64_t run_records = kRunRecords);

  int64_t record_bytes() const override { return record_bytes_; }
  int64_t place(const PlaceArgs& args) override;
  void release(int64_t offset_bytes) override;
  int64_t end_bytes() const override { return extents_.end_bytes(); }
  void close_runs() override;
  void tighten() override;
  void clear() override;
  void each_hole(const std::function<void(int64_t, int64_t)>& hole) const override {
    extents_.each_free(hole);
  }

 private:
  struct OpenRun {
    int64_t offset_bytes = 0;
    int64_t records_left = 0;
  };

  SequenceLayout(int64_t record_bytes, int64_t layers, int64_t run_records)
      : record_bytes_(record_bytes), run_records_(run_records), runs_(layers) {}
  void close_run(OpenRun& run);

  int64_t record_bytes_;
  int64_t run_records_;
  bool is_tight_ = false;
  std::vector<OpenRun> runs_;  // [layers]
  ExtentAllocator extents_;
};

}  // namespace kvswap
