#include "runtime/past_stream.h"

#include <algorithm>

namespace kvswap {

Result<std::unique_ptr<PastStream>> PastStream::open(Engine& engine, int64_t layer,
                                                     int64_t sequence, int64_t first_group,
                                                     int64_t end_group) {
  KVSWAP_ASSERT(first_group <= end_group && end_group <= engine.sealed_groups(layer));
  std::unique_ptr<PastStream> stream(new PastStream(engine, layer, sequence, end_group));
  stream->block_groups_ = std::min(engine.options().past_block_groups(engine.record_bytes()),
                                   std::max<int64_t>(1, end_group - first_group));
  for (Slot& slot : stream->slots_) {
    auto bytes = AlignedBytes::allocate(stream->block_groups_ * engine.record_bytes());
    if (!bytes.is_ok()) return bytes.status();
    slot.bytes = std::move(bytes.value());
  }
  KVSWAP_RETURN_IF_ERROR(stream->start(0, first_group));
  return stream;
}

PastStream::~PastStream() {
  // Nothing may land in memory that is gone; what went wrong is of no interest any more.
  for (Slot& slot : slots_) (void)engine_.finish_groups(slot.fetch).is_ok();
}

Status PastStream::start(int index, int64_t first_group) {
  Slot& slot = slots_[index];
  slot.block = {first_group, std::min(block_groups_, end_group_ - first_group), slot.bytes.data()};
  return engine_.start_groups(layer_, sequence_, first_group, slot.block.groups, slot.bytes.data(),
                              slot.fetch);
}

Result<PastStream::Block> PastStream::next() {
  Slot& slot = slots_[current_];
  KVSWAP_RETURN_IF_ERROR(engine_.finish_groups(slot.fetch));
  current_ = 1 - current_;
  KVSWAP_RETURN_IF_ERROR(start(current_, slot.block.first_group + slot.block.groups));
  return slot.block;
}

}  // namespace kvswap
