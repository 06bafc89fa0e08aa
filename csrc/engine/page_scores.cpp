#include "engine/page_scores.h"

namespace kvswap {
namespace {

bool is_wanted(const EngineOptions& options) {
  return options.replacement_policy() == Replacement::kScore && options.selects();
}

}  // namespace

int64_t PageScores::sequence_bytes(const EngineOptions& apart) {
  if (!is_wanted(apart)) return 0;
  return int64_t{sizeof(float)} * (apart.query_heads * apart.select_queries_max +
                                   apart.kv_heads * apart.pages_per_layer() * apart.group_tokens);
}

float* PageScores::log_sum_exp(int64_t queries) {
  if (!is_wanted(parts_.options)) return nullptr;
  log_sums_.resize(batch_.size() * parts_.options.query_heads * queries);
  return log_sums_.data();
}

void PageScores::rate(const LayerStep& step, int64_t layer, const PagedAttentionArgs& attended) {
  const EngineOptions& options = parts_.options;
  if (!is_wanted(options) || step.pages().empty()) return;
  const int64_t group_tokens = options.group_tokens;
  const int64_t slots = attended.pages_max * group_tokens;
  mean_.resize(batch_.size() * options.kv_heads * slots);
  attention_mass({.attention = attended, .mean = mean_.data()}, {.parallel = parts_.threads()});
  const Batch::Layer& state = batch_.layer(layer);
  const int64_t in_tail = (state.columns + group_tokens - 1) / group_tokens - state.sealed_groups;
  for (int64_t part = 0; part < batch_.size(); ++part) {
    const std::vector<int32_t>& pages = step.pages()[part];
    // They stand before the tail's, see PageTable.
    const int64_t first = attended.page_counts[part] - in_tail - static_cast<int64_t>(pages.size());
    for (size_t i = 0; i < pages.size(); ++i) {
      float paid = 0;
      for (int64_t head = 0; head < options.kv_heads; ++head) {
        const float* tokens = mean_.data() + (part * options.kv_heads + head) * slots +
                              (first + static_cast<int64_t>(i)) * group_tokens;
        for (int64_t token = 0; token < group_tokens; ++token) paid += tokens[token];
      }
      batch_.pages(part).map(layer).rate(pages[i], paid > 0 ? paid : 0);  // NaN: nothing
    }
  }
}

}  // namespace kvswap
