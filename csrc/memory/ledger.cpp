#include "memory/ledger.h"

#include <algorithm>
#include <numeric>

namespace kvswap {

Status Ledger::check(int64_t bytes, const std::string& what) const {
  KVSWAP_ASSERT(bytes >= 0);
  const int64_t needed = total() + bytes;
  if (limit_bytes_ < 0 || needed <= limit_bytes_) return Status::ok();
  return Status::budget(
      "kv_memory_bytes must hold " + what + ", which takes the session to " +
      std::to_string(needed) + " bytes; got " + std::to_string(limit_bytes_) +
      ": raise it to at least that, or lower summary.rank, memory.pages_per_layer, the "
      "context or the batch");
}

Status Ledger::charge(Use use, int64_t bytes, const std::string& what) {
  KVSWAP_RETURN_IF_ERROR(check(bytes, what));
  used_[static_cast<int>(use)] += bytes;
  peak_ = std::max(peak_, total());
  return Status::ok();
}

Status Ledger::charge(const Arena& arena, const std::string& what) {
  KVSWAP_RETURN_IF_ERROR(check(arena.total(), what));
  for (int use = 0; use < kUses; ++use) used_[use] += arena.of(static_cast<Use>(use));
  peak_ = std::max(peak_, total());
  return Status::ok();
}

void Ledger::release(const Arena& arena) {
  for (int use = 0; use < kUses; ++use) {
    release(static_cast<Use>(use), arena.of(static_cast<Use>(use)));
  }
}

void Ledger::release(Use use, int64_t bytes) {
  int64_t& used = used_[static_cast<int>(use)];
  KVSWAP_ASSERT(bytes >= 0 && bytes <= used);
  used -= bytes;
}

int64_t Ledger::total() const { return std::accumulate(used_.begin(), used_.end(), int64_t{0}); }

}  // namespace kvswap
