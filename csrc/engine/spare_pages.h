#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/engine_parts.h"
#include "engine/sequence_pages.h"

namespace kvswap {

/// Pages of sequences that are allocated and charged, and not in the batch: what leaves a batch is
/// what the next one takes. Not thread-safe.
class SparePages {
 public:
  /// sequence: what one of them takes.
  SparePages(EngineParts& parts, const Arena& sequence) : parts_(parts), sequence_(sequence) {}

  int64_t count() const { return static_cast<int64_t>(pages_.size()); }
  /// There are so many at least.
  Status grow(int64_t wanted);
  /// There are so many at most.
  void release(int64_t wanted);
  /// One of those that are there, empty.
  std::unique_ptr<SequencePages> take();
  /// Forgets what they hold.
  void give(std::unique_ptr<SequencePages> pages);

 private:
  EngineParts& parts_;
  const Arena& sequence_;
  std::vector<std::unique_ptr<SequencePages>> pages_;
};

}  // namespace kvswap
