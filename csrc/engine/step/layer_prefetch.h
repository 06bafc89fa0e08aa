#pragma once

#include <cstdint>
#include <utility>

#include "engine/step/step_reads.h"

namespace kvswap {

/// What is read for a layer before it chooses: what a predicted query chose, and what the layer
/// chose last. Where pages are shared the second is all that is there without a prediction.
///
///   idle --begin--> reading --end--> there --judge--> idle
///
/// A prefetch that cannot be begun, or does not arrive, is dropped and counted: who attends reads
/// again, and the error is theirs. AdaptivePrefetch counts what came of each, and what the
/// caller spent on it. Not thread-safe.
class LayerPrefetch {
 public:
  LayerPrefetch(int64_t layer, EngineContext& context, const Batch& batch, StepReads& reads)
      : layer_(layer), context_(context), batch_(batch), reads_(reads) {}

  /// A prediction is asked for this step.
  void expect() { has_predicted_ = true; }
  /// Where a selector answers to it, until it is begun or dropped.
  Groups& predicted() { return predicted_; }
  /// Begins to read what was predicted, beside `last`.
  void begin(const SpaceRequest& space, const Groups& last);
  bool is_reading() const { return is_reading_; }
  /// Waits; fails only where it cannot be waited for: then it stays reading.
  Status end();
  void drop();
  /// Does the plan of what is chosen follow one for this step?
  PageMap::Step step() const {
    return has_prefetched_ ? PageMap::Step::kSame : PageMap::Step::kNew;
  }
  /// The layer chose `chosen`; none: it gave up the step.
  void judge(const Groups& chosen);

  /// Seconds of the caller for this step's prediction.
  void spend(double seconds) { spent_seconds_ += seconds; }
  /// The step has ended; `waited_seconds`: for its reads.
  void report(double waited_seconds);
  void forget();

 private:
  Groups worth_reading(const Groups& last) const;

  int64_t layer_;
  EngineContext& context_;
  const Batch& batch_;
  StepReads& reads_;
  bool is_reading_ = false;
  bool has_prefetched_ = false;  // by a prediction
  bool has_predicted_ = false;
  double spent_seconds_ = 0;
  Groups predicted_;
};

}  // namespace kvswap
