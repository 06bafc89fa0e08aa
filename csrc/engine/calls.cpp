#include "engine/calls.h"

#include <unistd.h>

#include <string>

namespace kvswap {

Calls::Calls(EngineParts& parts, LayerSteps& steps)
    : parts_(parts), steps_(steps), owner_(getpid()) {}

bool Calls::is_own_process() const { return getpid() == owner_; }

Status Calls::check(int64_t layer) const {
  const int64_t layers = parts_.options.layers;
  if (layer < 0 || layer >= layers) {
    return Status::invalid("session: layer must be 0.." + std::to_string(layers - 1) + ", got " +
                           std::to_string(layer));
  }
  if (!is_own_process()) {
    return Status::invalid(
        "session: must be used by the process that opened it, got a call from a forked child; "
        "open a session of its own there");
  }
  return parts_.broken;
}

Status Calls::enter() { return enter(0); }

Status Calls::enter(int64_t layer) {
  KVSWAP_RETURN_IF_ERROR(check(layer));
  steps_.settle();
  return Status::ok();
}

Status Calls::enter_step(int64_t layer) {
  KVSWAP_RETURN_IF_ERROR(check(layer));
  steps_.settle_before(layer);
  return Status::ok();
}

Status Calls::leave(Status status) {
  const Status handed = parts_.space->compute().hand_back();
  return status.is_ok() ? handed : status;
}

}  // namespace kvswap
