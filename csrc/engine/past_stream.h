#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "engine/engine.h"
#include "memory/page_pool.h"

namespace kvswap {

/// Sealed groups of one sequence in blocks: the next block is read while the caller computes on
/// this one. What a long chunk attends its past through.
///
/// Two blocks are in memory at a time, where Engine::past_blocks() says. Not thread-safe; the
/// engine must not change while a stream is open.
class PastStream {
 public:
  struct Block {
    int64_t first_group = 0;
    int64_t groups = 0;                  // 0: the end
    const std::byte* records = nullptr;  // [groups, record_bytes], valid until the next next()
    const PastPages* listed = nullptr;   // where each group stands, perhaps apart from `records`
    std::byte* room = nullptr;           // as large, for who unpacks them; null: there is none
  };

  /// Groups [first_group, end_group).
  static Result<std::unique_ptr<PastStream>> open(Engine& engine, int64_t layer, int64_t sequence,
                                                  int64_t first_group, int64_t end_group);
  ~PastStream();
  PastStream(const PastStream&) = delete;
  PastStream& operator=(const PastStream&) = delete;

  Result<Block> next();

 private:
  PastStream(Engine& engine, int64_t layer, int64_t sequence, int64_t end_group)
      : engine_(engine), layer_(layer), sequence_(sequence), end_group_(end_group) {}
  Status start(int slot, int64_t first_group);

  struct Slot {
    Fetch fetch;
    Block block;
    PastPages listed;
  };

  Engine& engine_;
  int64_t layer_;
  int64_t sequence_;
  int64_t end_group_;
  PastBlocks blocks_;
  int current_ = 0;
  std::array<Slot, 2> slots_;
};

}  // namespace kvswap
