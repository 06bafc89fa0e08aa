#pragma once

#include <memory>

#include "device/device.h"
#include "methods/summary/summary_encoder.h"

namespace kvswap {

/// A selector of the method's rows, where `device` says (null: the host). check_method() has
/// passed.
std::unique_ptr<Selector> make_selector(const MethodOptions& options, Device* device);

}  // namespace kvswap
