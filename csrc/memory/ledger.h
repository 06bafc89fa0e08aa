#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "io/status.h"
#include "memory/arena.h"

namespace kvswap {

/// Counts every byte the session holds, by use; the limit is hard.
///
/// charge() before allocating, release() after freeing. Not thread-safe.
class Ledger {
 public:
  /// limit_bytes < 0: none.
  explicit Ledger(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  /// Would charge() of this many bytes pass?
  Status check(int64_t bytes, const std::string& what) const;
  /// `what` completes the sentence "kv_memory_bytes must hold ...". Nothing is charged on error.
  Status charge(Use use, int64_t bytes, const std::string& what);
  /// All of it or nothing.
  Status charge(const Arena& arena, const std::string& what);
  void release(Use use, int64_t bytes);
  void release(const Arena& arena);

  int64_t used(Use use) const { return used_[static_cast<int>(use)]; }
  int64_t total() const;
  int64_t peak() const { return peak_; }
  int64_t limit_bytes() const { return limit_bytes_; }

 private:
  int64_t limit_bytes_;
  int64_t peak_ = 0;
  std::array<int64_t, kUses> used_{};
};

}  // namespace kvswap
