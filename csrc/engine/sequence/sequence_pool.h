#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/engine_context.h"
#include "engine/sequence/sequence_pages.h"

namespace kvswap {

/// Pages of sequences that are allocated and charged, and not in the batch: what leaves a batch is
/// what the next one takes. Not thread-safe.
class SequencePool {
 public:
  /// sequence: what one of them takes.
  SequencePool(EngineContext& context, const Arena& sequence)
      : context_(context), sequence_(sequence) {}

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
  EngineContext& context_;
  const Arena& sequence_;
  std::vector<std::unique_ptr<SequencePages>> pages_;
};

}  // namespace kvswap
