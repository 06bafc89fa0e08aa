#include "engine/page_scores.h"

namespace kvswap {
void PageScores::reserve(Arena& arena, const Plan& plan, const Extent& extent) {
  arena.take(Use::kScratch,
             size_product({extent.batch, plan.step_mass_bytes(plan.page_numbers())}));
}

float* PageScores::log_sum_exp(int64_t queries) {
  return parts_.plan.page_numbers() > 0 ? mass_.log_sum_exp(queries) : nullptr;
}

Status PageScores::rate(const LayerStep& step, int64_t layer, const PagedAttentionArgs& attended) {
  const EngineOptions& options = parts_.options;
  if (parts_.plan.page_numbers() == 0 || step.pages().empty()) return Status::ok();
  const int64_t group_tokens = options.group_tokens;
  KVSWAP_RETURN_IF_ERROR(mass_.weigh(attended));
  const Batch::Layer& state = batch_.layer(layer);
  const int64_t in_tail = (state.positions + group_tokens - 1) / group_tokens - state.sealed_groups;
  for (int64_t part = 0; part < batch_.size(); ++part) {
    const std::vector<int32_t>& pages = step.pages()[part];
    // They stand before the tail's, see PageTable.
    const int64_t first = attended.page_counts[part] - in_tail - static_cast<int64_t>(pages.size());
    for (size_t i = 0; i < pages.size(); ++i) {
      float paid = 0;
      for (int64_t head = 0; head < options.kv_heads; ++head) {
        const float* tokens = mass_.means(part, head, first + static_cast<int64_t>(i));
        for (int64_t token = 0; token < group_tokens; ++token) paid += tokens[token];
      }
      batch_.pages(part).map(layer).rate(pages[i], paid > 0 ? paid : 0);  // NaN: nothing
    }
  }
  return Status::ok();
}

}  // namespace kvswap
