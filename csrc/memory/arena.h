#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <limits>

namespace kvswap {

/// What a byte of the budget is used for.
enum class Use {
  kPages,
  kRetained,  // tokens that stay whatever is asked
  kSummary,
  kTables,
  kStaging,
  kProjections,
  kScratch,
  kDevice,  // on a device, beside pages, summary and projections
  kPinned,  // host memory that copies to and from a device go through
  kTimeline,
};
inline constexpr int kUses = 10;
const char* use_name(Use use);

/// What overflows is this, which no budget and no disk holds; sums of some of it do not overflow.
inline constexpr int64_t kTooManyBytes = std::numeric_limits<int64_t>::max() / 64;

/// Of sizes that users choose.
inline int64_t size_product(std::initializer_list<int64_t> factors) {
  int64_t result = 1;
  for (const int64_t factor : factors) {
    if (__builtin_mul_overflow(result, factor, &result)) return kTooManyBytes;
  }
  return std::min(result, kTooManyBytes);
}

/// Memory that parts reserve, by use: counted, and nothing else.
///
/// Each part of an engine that allocates has one function, reserve(Arena&, ...), that takes what it
/// will. Their sum answers, before anything is opened, what a batch and a context need; once they
/// are there Ledger::charge() takes the same sum.
class Arena {
 public:
  void take(Use use, int64_t bytes) {
    int64_t& taken = taken_[static_cast<int>(use)];
    taken = std::min(taken + bytes, kTooManyBytes);
  }
  int64_t of(Use use) const { return taken_[static_cast<int>(use)]; }
  int64_t total() const;
  /// The same, of these uses alone.
  Arena only(std::initializer_list<Use> uses) const;

 private:
  std::array<int64_t, kUses> taken_{};
};

}  // namespace kvswap
