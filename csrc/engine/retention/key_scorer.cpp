#include "engine/retention/key_scorer.h"

#include <algorithm>
#include <span>

namespace kvswap {

void KeyScorer::reserve(Arena& arena, const Plan& plan) {
  if (plan.retention.kind.scored_by != ScoredBy::kKeys) return;
  const int64_t page = int64_t{sizeof(void*)} + plan.note_bytes;
  arena.take(Use::kStaging, plan.group_bytes + 2 * plan.past_block_groups * page);
}

Status KeyScorer::score(int64_t layer, int64_t sequence, std::vector<float>& mass) {
  const EngineOptions& options = context_.options;
  const int64_t group_tokens = options.group_tokens;
  const int64_t sealed = batch_.layer(layer).sealed_groups;
  auto blocks = past_.blocks();
  if (!blocks.is_ok()) return blocks.status();
  const int64_t most = 2 * blocks.value().groups;
  mass.clear();
  grow_mass(mass, sealed * group_tokens);
  room_.resize(context_.plan.group_bytes);
  const int64_t head_stride = context_.plan.record_shape.head_elements();
  for (int64_t group = batch_.validity(sequence).first_valid() / group_tokens; group < sealed;
       group += most) {
    const PrefixReader::Groups groups = {layer, sequence, group, std::min(most, sealed - group)};
    KVSWAP_RETURN_IF_ERROR(past_.load(groups, blocks.value().slots[0], blocks.value().memory));
    KVSWAP_RETURN_IF_ERROR(past_.list(groups, blocks.value().slots[0], listed_));
    for (int64_t i = 0; i < groups.count; ++i) {
      context_.retention.policy->score_keys(
          {.keys = {past_.tokens(listed_, i, room_.data()), head_stride, options.head_dim,
                    options.dtype},
           .kv_heads = options.kv_heads,
           .tokens = group_tokens,
           .head_dim = options.head_dim,
           .valid = batch_.mask(layer, sequence, group + i)},
          std::span(mass).subspan((group + i) * group_tokens, group_tokens));
    }
  }
  return Status::ok();
}

}  // namespace kvswap
