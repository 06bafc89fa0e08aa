#include "engine/step/adaptive_top_k.h"

#include <algorithm>
#include <cstdio>

#include "io/wait_policy.h"

namespace kvswap {

AdaptiveTopK::AdaptiveTopK(const EngineOptions& options)
    : options_(options), layers_(options.layers, {.groups = options.groups_max}) {}

void AdaptiveTopK::observe(int64_t layer, double share) {
  if (!options_.missed_mass_max) return;
  Layer& one = layers_[layer];
  one.missed = one.missed < 0 ? share : one.missed + (share - one.missed) / 4;
  if (one.missed > *options_.missed_mass_max) {
    if (excess_of(one) > 0) warn(layer);
    one.groups = std::min(options_.pages_max, one.groups + (one.groups + 3) / 4);
  } else if (one.missed < *options_.missed_mass_max / 2) {
    const int64_t least = (options_.groups_max + 3) / 4;
    one.groups = std::max(least, one.groups - one.groups / 8);
  }
}

double AdaptiveTopK::excess() const {
  double most = 0;
  for (const Layer& layer : layers_) most = std::max(most, excess_of(layer));
  return most;
}

double AdaptiveTopK::excess_of(const Layer& layer) const {
  if (!options_.missed_mass_max || layer.groups < options_.pages_max) return 0;
  return std::max(0.0, layer.missed - *options_.missed_mass_max);
}

void AdaptiveTopK::warn(int64_t layer) {
  if (has_warned_) return;
  has_warned_ = true;
  char text[256];
  std::snprintf(text, sizeof(text),
                "kvswap: layer %lld misses about %.1f %% of its attention with all its %lld pages, "
                "where audit.max_missed_mass allows %.1f %%; give it more memory, or allow more",
                static_cast<long long>(layer), 100 * layers_[layer].missed,
                static_cast<long long>(options_.pages_max), 100 * *options_.missed_mass_max);
  log_line(text);
}

}  // namespace kvswap
