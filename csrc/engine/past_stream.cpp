#include "engine/past_stream.h"

#include <algorithm>

namespace kvswap {

Result<std::unique_ptr<PastStream>> PastStream::open(Engine& engine, int64_t layer,
                                                     int64_t sequence, int64_t first_group,
                                                     int64_t end_group) {
  KVSWAP_ASSERT(first_group <= end_group &&
                end_group <= engine.sequences().layer(layer).sealed_groups);
  std::unique_ptr<PastStream> stream(new PastStream(engine, layer, sequence, end_group));
  auto blocks = engine.past_blocks(layer, sequence, end_group - first_group);
  if (!blocks.is_ok()) return blocks.status();
  stream->blocks_ = std::move(blocks.value());
  KVSWAP_RETURN_IF_ERROR(stream->start(0, first_group));
  return stream;
}

PastStream::~PastStream() {
  // Nothing may land in memory that is used otherwise; what went wrong is of no interest any more.
  PastReader& past = engine_.past();
  for (Slot& slot : slots_) {
    if (past.finish(slot.fetch).is_pending()) past.abandon(slot.fetch, blocks_.memory);
  }
}

Status PastStream::start(int index, int64_t first_group) {
  Slot& slot = slots_[index];
  std::byte* records = blocks_.slots[index];
  slot.block = {first_group, std::min(blocks_.groups, end_group_ - first_group), records,
                &slot.listed, blocks_.room};
  return engine_.past().start({layer_, sequence_, first_group, slot.block.groups}, records,
                              slot.fetch);
}

Result<PastStream::Block> PastStream::next() {
  Slot& slot = slots_[current_];
  KVSWAP_RETURN_IF_ERROR(engine_.past().finish(slot.fetch));
  KVSWAP_RETURN_IF_ERROR(
      engine_.past().list({layer_, sequence_, slot.block.first_group, slot.block.groups},
                          slot.block.records, slot.listed));
  current_ = 1 - current_;
  KVSWAP_RETURN_IF_ERROR(start(current_, slot.block.first_group + slot.block.groups));
  return slot.block;
}

}  // namespace kvswap
