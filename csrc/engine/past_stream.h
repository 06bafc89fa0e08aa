#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "engine/past_reader.h"

namespace kvswap {

/// Sealed groups of one sequence in blocks: the next block is read while the caller computes on
/// this one. What a long chunk attends its past through.
///
/// Two blocks are in memory at a time. Not thread-safe; the engine must not change while a stream
/// is open.
class PastStream {
 public:
  struct Block {
    int64_t first_group = 0;
    int64_t groups = 0;                  // 0: the end
    const std::byte* records = nullptr;  // [groups, record_bytes], valid until the next next()
    const PastPages* listed = nullptr;   // where each group stands, perhaps apart from `records`
    std::byte* room = nullptr;           // as large, for who unpacks them; null: there is none
  };

  static Result<std::unique_ptr<PastStream>> open(PastReader& past, PastBlocks blocks,
                                                  const PastReader::Groups& groups);
  ~PastStream();
  PastStream(const PastStream&) = delete;
  PastStream& operator=(const PastStream&) = delete;

  Result<Block> next();

 private:
  PastStream(PastReader& past, PastBlocks blocks, const PastReader::Groups& groups)
      : past_(past), groups_(groups), blocks_(std::move(blocks)) {}
  Status start(int slot, int64_t first_group);
  PastReader::Groups of(const Block& block) const {
    return {groups_.layer, groups_.sequence, block.first_group, block.groups};
  }

  struct Slot {
    Fetch fetch;
    Block block;
    PastPages listed;
  };

  PastReader& past_;
  PastReader::Groups groups_;
  PastBlocks blocks_;
  int current_ = 0;
  std::array<Slot, 2> slots_;
};

}  // namespace kvswap
