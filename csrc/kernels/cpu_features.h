#pragma once

#include <string>
#include <vector>

namespace kvswap {

/// The SIMD level that kernels use on this machine: "AVX3" (AVX-512), "AVX2", "NEON" or "SCALAR".
std::string simd_level();

/// All levels that are built in and that this machine can run, in rising order.
std::vector<std::string> simd_levels();

/// Makes all kernels use one of simd_levels() from now on; false, and no change, for another name.
/// For tests and comparisons: not while a kernel is running.
bool use_simd_level(const std::string& name);

}  // namespace kvswap
