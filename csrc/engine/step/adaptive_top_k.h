#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine_options.h"

namespace kvswap {

/// How many groups each layer selects in a step: groups_max, or with missed_mass_max as many as
/// what its audits find asks for, from a quarter of groups_max to pages_max.
///
/// A layer's looks are smoothed, each counting for a quarter. Above missed_mass_max a layer takes a
/// quarter more groups; below half of it, an eighth less. A layer that misses too much with all its
/// pages is reported in the log, once for all layers. Not thread-safe.
class AdaptiveTopK {
 public:
  explicit AdaptiveTopK(const EngineOptions& options);

  int64_t of(int64_t layer) const { return layers_[layer].groups; }
  /// A look at the layer found this share of its attention missed.
  void observe(int64_t layer, double share);
  /// By how much a layer that has all its pages misses more than it may, as a share: the worst
  /// layer's. 0: none does.
  double excess() const;

 private:
  struct Layer {
    int64_t groups = 0;
    double missed = -1;  // smoothed; -1: not looked at
  };
  double excess_of(const Layer& layer) const;
  void warn(int64_t layer);

  const EngineOptions& options_;
  std::vector<Layer> layers_;
  bool has_warned_ = false;
};

}  // namespace kvswap
