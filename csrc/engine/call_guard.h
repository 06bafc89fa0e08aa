#pragma once

#include <sys/types.h>

#include <cstdint>

#include "engine/engine_context.h"
#include "engine/step/step_coordinator.h"

namespace kvswap {

/// How every call to a session begins and ends.
///
/// It is made by the process that opened the session and names a layer that is there; while it runs
/// no choice is under way but that of its own step. Not thread-safe.
class CallGuard {
 public:
  CallGuard(EngineContext& context, StepCoordinator& steps);

  bool is_own_process() const;
  /// The first of it alone, for what touches no step.
  Status check(int64_t layer = 0) const;
  Status enter();  // a call that names no layer
  Status enter(int64_t layer);
  Status enter_crop();               // crop() and reset(), which end an unfinished crop
  Status enter_step(int64_t layer);  // see StepCoordinator::drain_before()
  /// The caller's tensors are its own again.
  Status leave(Status status);

 private:
  Status check_place(int64_t layer) const;

  EngineContext& context_;
  StepCoordinator& steps_;
  pid_t owner_;
};

}  // namespace kvswap
