#include "engine/backend/staging_buffers.h"

#include <algorithm>

namespace kvswap {

Status StagingBuffers::open() {
  for (Lane& lane : lanes_) {
    Event* const events[] = {&lane.begins, &lane.copied};
    KVSWAP_RETURN_IF_ERROR(make_events(device_, events));
  }
  return Status::ok();
}

void StagingBuffers::reserve(std::byte* host, int64_t lane_records, int64_t record_bytes) {
  for (const Lane& lane : lanes_) KVSWAP_ASSERT(!lane.is_lent);
  host_ = host;
  lane_records_ = lane_records;
  record_bytes_ = record_bytes;
}

bool StagingBuffers::has_room() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return !lane.is_lent; });
}

Status StagingBuffers::acquire(Fetch& fetch) {
  KVSWAP_ASSERT(fetch.lane < 0 && static_cast<int64_t>(fetch.loads.size()) <= lane_records_);
  if (fetch.loads.empty()) return Status::ok();
  const auto free =
      std::find_if(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return !lane.is_lent; });
  KVSWAP_ASSERT(free != lanes_.end());
  KVSWAP_RETURN_IF_ERROR(device_.synchronize(free->copied));
  if (const double copies = std::exchange(free->stands_for, 0); copies > 0) {
    copy_seconds_ += copies * device_.seconds_between(free->begins, free->copied);
  }
  free->is_lent = true;
  fetch.lane = static_cast<int>(free - lanes_.begin());
  std::byte* target = memory(fetch.lane);
  for (Load& load : fetch.loads) {
    load.target = target;
    target += record_bytes_;
  }
  return Status::ok();
}

void StagingBuffers::copy(Fetch& fetch, std::byte* staging, std::byte* const* pages,
                          bool is_timed) {
  Lane& lane = lanes_[fetch.lane];
  const auto count = static_cast<int64_t>(fetch.loads.size());
  untimed_records_ += count;
  if (is_timed) {
    const auto records = static_cast<double>(std::exchange(untimed_records_, 0));
    lane.stands_for = records / static_cast<double>(count);
    device_.record(lane.begins);
  }
  device_.copy_in(staging, memory(fetch.lane), count * record_bytes_);
  device_.launch(cuda::CopyRecordsArgs{.source = staging,
                                       .source_stride = record_bytes_,
                                       .targets = reinterpret_cast<void* const*>(pages),
                                       .count = count,
                                       .bytes = record_bytes_});
  device_.record(lane.copied);
}

void StagingBuffers::release(Fetch& fetch) {
  if (fetch.lane >= 0) lanes_[fetch.lane].is_lent = false;
  fetch.lane = -1;
}

}  // namespace kvswap
