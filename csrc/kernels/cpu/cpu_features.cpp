#include "kernels/cpu_features.h"

#include <atomic>
#include <iterator>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/cpu_features.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/targets.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

const char* level_name() {
#if KVSWAP_HAS_HIGHWAY
  return HWY_TARGET == HWY_EMU128 ? "SCALAR" : hwy::TargetName(HWY_TARGET);
#else
  return "SCALAR";
#endif
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(level_name);

namespace {

/// What this CPU and operating system can run: the instruction sets Highway's variants assume.
bool runs_here(SimdLevel level) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("f16c") && __builtin_cpu_supports("pclmul") &&
                    __builtin_cpu_supports("aes");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd");
  return level == SimdLevel::kBaseline || (avx2 && (level == SimdLevel::kAvx2 || avx512));
#else
  return level == SimdLevel::kBaseline;
#endif
}

bool is_usable(SimdLevel level) {
  const int index = static_cast<int>(level);
  return index < static_cast<int>(std::size(level_name_table)) && level_name_table[index] &&
         runs_here(level);
}

SimdLevel best_level() {
  for (int level = static_cast<int>(SimdLevel::kCount) - 1; level > 0; --level) {
    if (is_usable(static_cast<SimdLevel>(level))) return static_cast<SimdLevel>(level);
  }
  return SimdLevel::kBaseline;
}

std::atomic<SimdLevel>& level_in_use() {
  static std::atomic<SimdLevel> level = best_level();
  return level;
}

}  // namespace

SimdLevel active_simd_level() { return level_in_use().load(std::memory_order_relaxed); }

std::string simd_level() { return KVSWAP_DISPATCH(level_name)(); }

std::vector<std::string> simd_levels() {
  std::vector<std::string> names;
  for (int level = 0; level < static_cast<int>(SimdLevel::kCount); ++level) {
    if (is_usable(static_cast<SimdLevel>(level))) names.push_back(level_name_table[level]());
  }
  return names;
}

bool use_simd_level(const std::string& name) {
  for (int level = 0; level < static_cast<int>(SimdLevel::kCount); ++level) {
    if (is_usable(static_cast<SimdLevel>(level)) && name == level_name_table[level]()) {
      level_in_use() = static_cast<SimdLevel>(level);
      return true;
    }
  }
  return false;
}

}  // namespace kvswap
#endif  // HWY_ONCE
