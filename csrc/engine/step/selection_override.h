#pragma once

#include <cstdint>

#include "engine/step/step_reads.h"

namespace kvswap {

/// What is chosen in the place of a layer's next selection, and of the prediction for it: each
/// once. Not thread-safe.
class SelectionOverride {
 public:
  SelectionOverride(int64_t layer, const EngineContext& context, const Batch& batch)
      : layer_(layer), context_(context), batch_(batch) {}

  /// predicted: none for what its query chooses.
  Status set(Groups groups, Groups predicted);
  // In the place of `groups` where something was set for it: of it what is sealed now, and not
  // attended anyway.
  void apply(Groups& groups) { apply(selection_, groups); }
  void apply_to_prediction(Groups& groups) { apply(prediction_, groups); }
  /// The groups' numbers mean others now.
  void clear();

 private:
  Status check(const char* name, Groups& groups) const;
  void apply(Groups& set, Groups& groups) const;

  int64_t layer_;
  const EngineContext& context_;
  const Batch& batch_;
  Groups selection_;  // empty: nothing replaces the next one
  Groups prediction_;
};

}  // namespace kvswap
