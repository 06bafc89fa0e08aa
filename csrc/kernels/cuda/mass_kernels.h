#pragma once

#include "io/status.h"
#include "kernels/attention_mass.h"
#include "kernels/observe_keys.h"

namespace kvswap::cuda {

/// The contracts' arguments by the rules of kernels.h, all pointers on the device; head_dim up to
/// 256, any number.
Status attention_mass(const AttentionMassArgs& args, void* stream);
Status observe_keys(const ObserveKeysArgs& args, void* scratch, void* stream);
int64_t observe_keys_scratch_bytes(const ObserveKeysArgs& args);

}  // namespace kvswap::cuda
