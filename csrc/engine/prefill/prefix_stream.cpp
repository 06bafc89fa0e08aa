#include "engine/prefill/prefix_stream.h"

#include <algorithm>

namespace kvswap {

Result<std::unique_ptr<PrefixStream>> PrefixStream::open(PrefixReader& past, PrefixBlocks blocks,
                                                         const PrefixReader::Groups& groups) {
  std::unique_ptr<PrefixStream> stream(new PrefixStream(past, std::move(blocks), groups));
  KVSWAP_RETURN_IF_ERROR(stream->start(0, groups.first));
  return stream;
}

PrefixStream::~PrefixStream() {
  // Nothing may land in memory that is used otherwise; what went wrong is of no interest any more.
  for (Slot& slot : slots_) {
    if (past_.finish(slot.fetch).is_pending()) past_.abandon(slot.fetch, blocks_.memory);
  }
}

Status PrefixStream::start(int index, int64_t first_group) {
  Slot& slot = slots_[index];
  std::byte* records = blocks_.slots[index];
  const int64_t end_group = groups_.first + groups_.count;
  slot.block = {first_group, std::min(blocks_.groups, end_group - first_group), records,
                &slot.listed, blocks_.room};
  return past_.start(of(slot.block), records, slot.fetch);
}

Result<PrefixStream::Block> PrefixStream::next() {
  Slot& slot = slots_[current_];
  KVSWAP_RETURN_IF_ERROR(past_.finish(slot.fetch));
  KVSWAP_RETURN_IF_ERROR(past_.list(of(slot.block), slot.block.records, slot.listed));
  current_ = 1 - current_;
  KVSWAP_RETURN_IF_ERROR(start(current_, slot.block.first_group + slot.block.groups));
  return slot.block;
}

}  // namespace kvswap
