#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine_options.h"

namespace kvswap {

/// With look_ahead=verify: what came of each layer's predictions, and whether it predicts.
///
/// A layer predicts at first. Now and then it does a few steps the other way, and goes on in the
/// way that takes less time. What is compared are averages over steps, the newest counting most, of
/// what the caller spent on the prediction (its query, its scores, its plan) and on waiting for the
/// layer's reads. A prediction that reads mostly in vain is left sooner, so that a slow disk does
/// not read twice until a trial ends. The moments of trials depend on the number of the layer's
/// steps, and on what was selected. Not thread-safe.
class AdaptivePrefetch {
 public:
  static constexpr int64_t kStepsToFirstTrial = 8;
  static constexpr int64_t kStepsBetweenTrials = 128;
  static constexpr int64_t kTrialSteps = 8;
  /// Of groups that were prefetched so many must be chosen, or the layer stops at so many steps.
  static constexpr double kHitShareLeast = 0.25;
  static constexpr int64_t kStepsInVain = 2;

  struct Counts {
    uint64_t hits = 0;     // groups read before the layer chose them
    uint64_t wasted = 0;   // groups read, and not chosen in that step
    uint64_t dropped = 0;  // prefetches that failed, or could not be begun
  };

  explicit AdaptivePrefetch(const EngineOptions& options) : layers_(options.layers) {}

  /// Whether the layer's next step scores a prediction.
  bool predicts(int64_t layer) const { return layers_[layer].predicts; }
  /// A step of the layer that chose has ended; seconds: that it spent and waited, as above.
  void observe(int64_t layer, bool has_predicted, double seconds);
  void count(int64_t layer, const Counts& counts);

  const Counts& counts(int64_t layer) const { return layers_[layer].counts; }
  Counts total() const;
  /// Share of what was prefetched for the layer that it chose, the newest steps counting most; -1:
  /// nothing was.
  double hit_share(int64_t layer) const { return layers_[layer].hit_share; }

 private:
  struct Layer {
    bool predicts = true;
    bool is_on_trial = false;
    int64_t steps = kStepsBetweenTrials - kStepsToFirstTrial;  // since a trial began or ended
    int64_t predicted_steps = 0;                               // since it last did not predict
    double seconds_with = -1;
    double seconds_without = -1;
    double hit_share = -1;
    Counts counts;
  };

  std::vector<Layer> layers_;
};

}  // namespace kvswap
