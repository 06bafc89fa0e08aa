#include "store/record_locations.h"

#include <limits>
#include <utility>

namespace kvswap {

RecordLocations::RecordLocations(DataFile* file, std::unique_ptr<Layout> layout,
                                 int64_t begin_bytes, uint64_t seed,
                                 std::vector<SeedRange> seeds_below)
    : file_(file),
      layout_(std::move(layout)),
      begin_bytes_(begin_bytes),
      seeds_(std::move(seeds_below)) {
  KVSWAP_ASSERT(begin_bytes_ % record_bytes() == 0);
  seeds_.push_back({first_place(), seed});
}

Result<int64_t> RecordLocations::take(const PlaceArgs& args) {
  auto offset = place(args);
  if (offset.is_ok()) return offset;
  // Near the disk's or the quota's end what was taken ahead is worth more as room.
  layout_->tighten();
  return place(args);
}

bool RecordLocations::has_room_beside(std::span<const int64_t> offsets, int64_t count) const {
  return layout_->has_room_beside(in_layout(offsets), count);
}

std::vector<int64_t> RecordLocations::in_layout(std::span<const int64_t> offsets) const {
  std::vector<int64_t> own(offsets.begin(), offsets.end());
  for (int64_t& offset : own) offset -= begin_bytes_;
  return own;
}

Result<int64_t> RecordLocations::place(const PlaceArgs& args) {
  const std::vector<int64_t> beside = in_layout(args.beside);
  const std::vector<int64_t> instead = in_layout(args.instead);
  PlaceArgs inner = args;
  inner.beside = beside;
  inner.instead = instead;
  const int64_t offset = layout_->place(inner);
  const bool has_numbers = end_bytes() / record_bytes() <= std::numeric_limits<uint32_t>::max();
  const Status reserved =
      has_numbers
          ? file_->reserve(end_bytes())
          : Status::budget("record store: a session's file must hold fewer than 2^32 records");
  if (reserved.is_ok()) return begin_bytes_ + offset;
  for (int64_t i = 0; i < args.count; ++i) layout_->release(offset + i * record_bytes());
  return reserved;
}

void RecordLocations::release(uint32_t place) {
  const int64_t offset = offset_bytes(place);
  if (offset < begin_bytes_) return;
  layout_->release(offset - begin_bytes_);
  file_->discard(offset, record_bytes());
}

void RecordLocations::clear() {
  file_->discard(begin_bytes_, layout_->end_bytes());
  layout_->clear();
}

uint64_t RecordLocations::seed_of(uint32_t place) const {
  auto range = seeds_.rbegin();
  while (place < range->place) ++range;
  return range->seed;
}

void RecordLocations::each_hole(const std::function<void(int64_t, int64_t)>& hole) {
  layout_->close_runs();
  layout_->each_hole([&](int64_t offset, int64_t length) { hole(begin_bytes_ + offset, length); });
}

void RecordLocations::begin_file(int64_t begin_bytes, uint64_t seed) {
  KVSWAP_ASSERT(begin_bytes >= end_bytes() && begin_bytes % record_bytes() == 0);
  begin_bytes_ = begin_bytes;
  seeds_.push_back({first_place(), seed});
  layout_->clear();
}

}  // namespace kvswap
