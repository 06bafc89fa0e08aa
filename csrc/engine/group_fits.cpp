#include "engine/group_fits.h"

#include <algorithm>

#include "methods/group_fit.h"
#include "methods/keeper.h"

namespace kvswap {

int64_t GroupFits::fixed_bytes(const EngineOptions& apart, int64_t record_bytes) {
  if (!apart.keeper_kind().keeps_outliers) return 0;
  const int64_t page = int64_t{sizeof(void*)} + apart.note_bytes();
  return apart.group_bytes() + 2 * past_block_groups(apart, record_bytes) * page;
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
  room_.resize(options.group_bytes());
  // K of each KV head, then its V.
  const int64_t head_stride = 2 * group_tokens * options.head_dim;
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
