#include <string>

#include "store/layout.h"

namespace kvswap {

Result<std::unique_ptr<Layout>> SequenceLayout::create(int64_t payload_bytes,
                                                       int64_t alignment_bytes, int64_t layers,
                                                       int64_t run_records) {
  const int64_t record_bytes =
      (payload_bytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
  if (record_bytes > 2 * payload_bytes) {
    return Status::invalid(
        "layout: a group's bytes must fill at least half of what the disk reads at once (" +
        std::to_string(alignment_bytes) + " bytes), got a group of " +
        std::to_string(payload_bytes) + " bytes; raise selection.group_tokens");
  }
  return std::unique_ptr<Layout>(new SequenceLayout(record_bytes, layers, run_records));
}

std::unique_ptr<Layout> SequenceLayout::continuing(int64_t record_bytes, int64_t layers,
                                                   int64_t run_records) {
  return std::unique_ptr<Layout>(new SequenceLayout(record_bytes, layers, run_records));
}

int64_t SequenceLayout::place(const PlaceArgs& args) {
  const int64_t count = args.count;
  // Many records at once stand together anyway, and would leave holes at the ends of runs.
  const bool is_apart = args.purpose == PlaceFor::kPool || count > run_records_ / 8;
  if (is_tight_ || is_apart) return extents_.allocate(count * record_bytes_);
  OpenRun& run = runs_.at(args.layer);
  if (run.records_left < count) {
    close_run(run);
    const int64_t records = run_records_ / count * count;
    run = {extents_.allocate(records * record_bytes_), records};
  }
  const int64_t offset = run.offset_bytes;
  run.offset_bytes += count * record_bytes_;
  run.records_left -= count;
  return offset;
}

void SequenceLayout::close_run(OpenRun& run) {
  if (run.records_left > 0) extents_.release(run.offset_bytes, run.records_left * record_bytes_);
  run = {};
}

void SequenceLayout::close_runs() {
  for (OpenRun& run : runs_) close_run(run);
}

void SequenceLayout::tighten() {
  close_runs();
  is_tight_ = true;
}

void SequenceLayout::release(int64_t offset_bytes) {
  extents_.release(offset_bytes, record_bytes_);
}

void SequenceLayout::clear() {
  extents_.clear();
  runs_.assign(runs_.size(), {});
  is_tight_ = false;
}

}  // namespace kvswap
