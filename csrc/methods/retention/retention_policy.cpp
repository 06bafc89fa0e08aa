#include "methods/retention/retention_policy.h"

#include "io/status.h"

namespace kvswap {

void RetentionPolicy::add_scores(const HeadAttention& attention, const BlockScores& scores) const {
  for (size_t token = 0; token < attention.sums.size(); ++token) {
    scores[static_cast<int64_t>(token)] += attention.sums[token];
  }
}

void RetentionPolicy::score_keys(const GroupKeys&, std::span<float>) const { KVSWAP_ASSERT(false); }

std::vector<int32_t> RetentionPolicy::survivors(std::span<const int32_t>,
                                                std::span<const float>) const {
  KVSWAP_ASSERT(false);
  return {};
}

double RetentionPolicy::share_in_dtype(std::optional<double>, double) const { return 1.0; }

std::vector<int64_t> RetentionPolicy::divide(std::span<const LayerPrompt>, int64_t) const {
  KVSWAP_ASSERT(false);
  return {};
}

}  // namespace kvswap
