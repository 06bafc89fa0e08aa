#include "engine/call_guard.h"

#include <unistd.h>

#include <string>

namespace kvswap {

CallGuard::CallGuard(EngineContext& context, StepCoordinator& steps)
    : context_(context), steps_(steps), owner_(getpid()) {}

bool CallGuard::is_own_process() const { return getpid() == owner_; }

Status CallGuard::check(int64_t layer) const {
  KVSWAP_RETURN_IF_ERROR(check_place(layer));
  if (!context_.unfinished_crop) return Status::ok();
  const auto& [positions, cause] = *context_.unfinished_crop;
  return Status::storage("session: must first be cropped to " + std::to_string(positions) +
                             " positions, since that was stopped half-way; call crop() again, or "
                             "reset(). It was stopped by: " +
                             cause.message(),
                         cause.error_number());
}

Status CallGuard::check_place(int64_t layer) const {
  const int64_t layers = context_.options.layers;
  if (layer < 0 || layer >= layers) {
    return Status::invalid("session: layer must be 0.." + std::to_string(layers - 1) + ", got " +
                           std::to_string(layer));
  }
  if (!is_own_process()) {
    return Status::invalid(
        "session: must be used by the process that opened it, got a call from a forked child; "
        "open a session of its own there");
  }
  return context_.broken;
}

Status CallGuard::enter() { return enter(0); }

Status CallGuard::enter(int64_t layer) {
  KVSWAP_RETURN_IF_ERROR(check(layer));
  steps_.drain();
  return Status::ok();
}

Status CallGuard::enter_crop() {
  KVSWAP_RETURN_IF_ERROR(check_place(0));
  steps_.drain();
  return Status::ok();
}

Status CallGuard::enter_step(int64_t layer) {
  KVSWAP_RETURN_IF_ERROR(check(layer));
  steps_.drain_before(layer);
  return Status::ok();
}

Status CallGuard::leave(Status status) {
  const Status handed = context_.space->compute().hand_back();
  return status.is_ok() ? handed : status;
}

}  // namespace kvswap
