#include "engine/past_stream.h"

#include <algorithm>

namespace kvswap {

Result<std::unique_ptr<PastStream>> PastStream::open(Engine& engine, int64_t layer,
                                                     int64_t sequence, int64_t first_group,
                                                     int64_t end_group) {
  KVSWAP_ASSERT(first_group <= end_group && end_group <= engine.sealed_groups(layer));
  std::unique_ptr<PastStream> stream(new PastStream(engine, layer, sequence, end_group));
  auto memory = engine.past().blocks();
  if (!memory.is_ok()) return memory.status();
  stream->memory_ = std::move(memory.value());
  stream->block_groups_ = engine.options().past_block_groups(engine.parts().record_bytes());
  for (int i = 0; i < 2; ++i) {
    stream->slots_[i].bytes =
        stream->memory_.get() + i * stream->block_groups_ * engine.parts().record_bytes();
  }
  KVSWAP_RETURN_IF_ERROR(stream->start(0, first_group));
  return stream;
}

PastStream::~PastStream() {
  // Nothing may land in memory that is used otherwise; what went wrong is of no interest any more.
  PastReader& past = engine_.past();
  for (Slot& slot : slots_) {
    if (past.finish(slot.fetch).is_pending()) past.abandon(slot.fetch, memory_);
  }
}

Status PastStream::start(int index, int64_t first_group) {
  Slot& slot = slots_[index];
  slot.block = {first_group, std::min(block_groups_, end_group_ - first_group), slot.bytes};
  return engine_.past().start({layer_, sequence_, first_group, slot.block.groups}, slot.bytes,
                              slot.fetch);
}

Result<PastStream::Block> PastStream::next() {
  Slot& slot = slots_[current_];
  KVSWAP_RETURN_IF_ERROR(engine_.past().finish(slot.fetch));
  current_ = 1 - current_;
  KVSWAP_RETURN_IF_ERROR(start(current_, slot.block.first_group + slot.block.groups));
  return slot.block;
}

}  // namespace kvswap
