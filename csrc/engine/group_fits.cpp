#include "engine/group_fits.h"

#include <algorithm>

#include "methods/group_fit.h"
#include "methods/keeper.h"

namespace kvswap {

void GroupFits::reserve(Arena& arena, const Plan& plan) {
  if (!plan.keep.kind.keeps_outliers) return;
  const int64_t page = int64_t{sizeof(void*)} + plan.note_bytes;
  arena.take(Use::kStaging, plan.group_bytes + 2 * plan.past_block_groups * page);
}

Status GroupFits::weigh(int64_t layer, int64_t part, std::vector<float>& mass) {
  const EngineOptions& options = parts_.options;
  const int64_t group_tokens = options.group_tokens;
  const int64_t sealed = batch_.layer(layer).sealed_groups;
  auto blocks = past_.blocks();
  if (!blocks.is_ok()) return blocks.status();
  const int64_t most = 2 * blocks.value().groups;
  mass.clear();
  grow_mass(mass, sealed * group_tokens);
  room_.resize(parts_.plan.group_bytes);
  const int64_t head_stride = parts_.plan.record_shape.head_elements();
  for (int64_t group = batch_.validity(part).first_valid() / group_tokens; group < sealed;
       group += most) {
    const PastReader::Groups groups = {layer, part, group, std::min(most, sealed - group)};
    KVSWAP_RETURN_IF_ERROR(past_.load(groups, blocks.value().slots[0], blocks.value().memory));
    KVSWAP_RETURN_IF_ERROR(past_.list(groups, blocks.value().slots[0], listed_));
    for (int64_t i = 0; i < groups.count; ++i) {
      const float worth = outlier_worth({.keys = {past_.tokens(listed_, i, room_.data()),
                                                  head_stride, options.head_dim, options.dtype},
                                         .kv_heads = options.kv_heads,
                                         .tokens = group_tokens,
                                         .head_dim = options.head_dim,
                                         .valid = batch_.mask(layer, part, group + i)});
      std::fill_n(mass.begin() + (group + i) * group_tokens, group_tokens, worth);
    }
  }
  return Status::ok();
}

}  // namespace kvswap
