#include "engine/step/adaptive_prefetch.h"

namespace kvswap {
namespace {

constexpr double kWeight = 0.125;  // of the newest step in an average
// The other way must take so much less: neither changes at every trial by chance.
constexpr double kClearlyLess = 0.9;

void average(double& of, double newest) { of = of < 0 ? newest : of + kWeight * (newest - of); }

}  // namespace

void AdaptivePrefetch::observe(int64_t layer, bool has_predicted, double seconds) {
  Layer& one = layers_[layer];
  average(has_predicted ? one.seconds_with : one.seconds_without, seconds);
  ++one.steps;
  one.predicted_steps = has_predicted ? one.predicted_steps + 1 : 0;
  const bool is_in_vain = one.hit_share >= 0 && one.hit_share < kHitShareLeast;
  if (is_in_vain && one.predicted_steps >= kStepsInVain) {
    one.predicts = one.is_on_trial = false;
    one.steps = 0;
  } else if (one.is_on_trial && one.steps == kTrialSteps) {
    const bool was = !one.predicts;  // before the trial
    const double usual = was ? one.seconds_with : one.seconds_without;
    const double tried = was ? one.seconds_without : one.seconds_with;
    const bool is_known = usual >= 0 && tried >= 0;
    one.predicts = is_known && tried < kClearlyLess * usual ? !was : was;
    one.is_on_trial = false;
    one.steps = 0;
  } else if (!one.is_on_trial && one.steps == kStepsBetweenTrials) {
    one.predicts = !one.predicts;
    one.is_on_trial = true;
    one.steps = 0;
    // What was tried last was another time.
    (one.predicts ? one.seconds_with : one.seconds_without) = -1;
    if (one.predicts) one.hit_share = -1;
  }
}

void AdaptivePrefetch::count(int64_t layer, const Counts& counts) {
  Layer& one = layers_[layer];
  one.counts.hits += counts.hits;
  one.counts.wasted += counts.wasted;
  one.counts.dropped += counts.dropped;
  const uint64_t read = counts.hits + counts.wasted;
  if (read > 0) {
    average(one.hit_share, static_cast<double>(counts.hits) / static_cast<double>(read));
  }
}

AdaptivePrefetch::Counts AdaptivePrefetch::total() const {
  Counts total;
  for (const Layer& layer : layers_) {
    total.hits += layer.counts.hits;
    total.wasted += layer.counts.wasted;
    total.dropped += layer.counts.dropped;
  }
  return total;
}

}  // namespace kvswap
