#include "engine/past_walk.h"

#include <algorithm>
#include <vector>

namespace kvswap {
namespace {

Status walk_sealed(Engine& engine, const PastWalk& walk, int64_t first_group, int64_t end_group,
                   PastVisitor& visitor) {
  if (first_group >= end_group) return Status::ok();
  auto stream = PastStream::open(engine, walk.layer, walk.part, first_group, end_group);
  if (!stream.is_ok()) return stream.status();
  while (true) {
    auto block = stream.value()->next();
    if (!block.is_ok()) return block.status();
    if (block.value().groups == 0) return Status::ok();
    KVSWAP_RETURN_IF_ERROR(visitor.visit_sealed(block.value()));
  }
}

}  // namespace

Status walk_past(Engine& engine, const PastWalk& walk, PastVisitor& visitor) {
  const EngineOptions& options = engine.parts().options;
  const int64_t group_tokens = options.group_tokens;
  const int64_t gone = engine.parts().store->tables().first_group(walk.layer, walk.part);
  if (gone > 0)
    KVSWAP_RETURN_IF_ERROR(
        visitor.visit_left(engine.keeping().dropping().left(walk.layer, walk.part)));
  const int64_t first_group =
      std::max(gone, std::min(walk.past, engine.sequences().validity(walk.part).first_valid()) /
                         group_tokens);
  // append() may have sealed a group that the chunk's own first tokens fill up.
  const int64_t end_group =
      std::min(walk.past / group_tokens, engine.sequences().layer(walk.layer).sealed_groups);
  KVSWAP_RETURN_IF_ERROR(walk_sealed(engine, walk, first_group, end_group, visitor));
  // Padding may reach past all that is sealed.
  const int64_t begin = std::max(first_group, end_group) * group_tokens;
  if (begin >= walk.past) return Status::ok();
  const int64_t bytes =
      options.kv_heads * (walk.past - begin) * options.head_dim * dtype_bytes(options.dtype);
  std::vector<std::byte> keys(bytes);
  std::vector<std::byte> values(bytes);
  KVSWAP_RETURN_IF_ERROR(
      engine.read_part(walk.layer, walk.part, begin, walk.past, keys.data(), values.data()));
  return visitor.visit_newest(begin, walk.past, keys.data(), values.data());
}

}  // namespace kvswap
