#include "engine/step/page_attention.h"

namespace kvswap {
void PageAttention::reserve(Arena& arena, const Plan& plan, const Extent& extent) {
  arena.take(Use::kScratch,
             size_product({extent.batch, plan.step_attention_bytes(plan.page_numbers())}));
}

float* PageAttention::log_sum_exp(int64_t queries) {
  return context_.plan.page_numbers() > 0 ? mass_.log_sum_exp(queries) : nullptr;
}

Status PageAttention::rate(const LayerStep& step, int64_t layer,
                           const PagedAttentionArgs& attended) {
  const EngineOptions& options = context_.options;
  if (context_.plan.page_numbers() == 0 || step.pages().empty()) return Status::ok();
  const int64_t group_tokens = options.group_tokens;
  KVSWAP_RETURN_IF_ERROR(mass_.score(attended));
  const Batch::Layer& state = batch_.layer(layer);
  const int64_t in_tail = (state.positions + group_tokens - 1) / group_tokens - state.sealed_groups;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    const std::vector<int32_t>& pages = step.pages()[sequence];
    // They stand before the tail's, see PageTable.
    const int64_t first =
        attended.page_counts[sequence] - in_tail - static_cast<int64_t>(pages.size());
    for (size_t i = 0; i < pages.size(); ++i) {
      float received = 0;
      for (int64_t head = 0; head < options.kv_heads; ++head) {
        const float* tokens = mass_.means(sequence, head, first + static_cast<int64_t>(i));
        for (int64_t token = 0; token < group_tokens; ++token) received += tokens[token];
      }
      batch_.pages(sequence).map(layer).rate(pages[i],
                                             received > 0 ? received : 0);  // NaN: nothing
    }
  }
  return Status::ok();
}

}  // namespace kvswap
