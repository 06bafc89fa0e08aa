#pragma once

#include <optional>
#include <string>

#include "device/device.h"
#include "io/status.h"

namespace kvswap {

/// The device that a name stands for; nothing for "cpu", which is no device. "host" is the device
/// path over host memory, for tests; "cuda" and "cuda:1" are known where the library was built with
/// CUDA. Every other name is kInvalid.
Result<std::optional<DeviceKind>> find_device(const std::string& name);

/// Answers for names that begin with "cuda"; throws nothing.
using FindCuda = Result<std::optional<DeviceKind>> (*)(const std::string& name);

/// Called once, at load time, by the library that has CUDA.
void set_find_cuda(FindCuda find);

}  // namespace kvswap
