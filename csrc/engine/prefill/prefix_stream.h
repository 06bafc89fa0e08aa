#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "engine/prefill/prefix_reader.h"

namespace kvswap {

/// Sealed groups of one sequence in blocks: the next block is read while the caller computes on
/// this one. What a long chunk attends its prefix through.
///
/// Two blocks are in memory at a time. Not thread-safe; the engine must not change while a stream
/// is open.
class PrefixStream {
 public:
  struct Block {
    int64_t first_group = 0;
    int64_t groups = 0;                   // 0: the end
    const std::byte* records = nullptr;   // [groups, record_bytes], valid until the next next()
    const PrefixPages* listed = nullptr;  // where each group stands, perhaps apart from `records`
    std::byte* room = nullptr;            // as large, for who unpacks them; null: there is none
  };

  static Result<std::unique_ptr<PrefixStream>> open(PrefixReader& past, PrefixBlocks blocks,
                                                    const PrefixReader::Groups& groups);
  ~PrefixStream();
  PrefixStream(const PrefixStream&) = delete;
  PrefixStream& operator=(const PrefixStream&) = delete;

  Result<Block> next();

 private:
  PrefixStream(PrefixReader& past, PrefixBlocks blocks, const PrefixReader::Groups& groups)
      : past_(past), groups_(groups), blocks_(std::move(blocks)) {}
  Status start(int slot, int64_t first_group);
  PrefixReader::Groups of(const Block& block) const {
    return {groups_.layer, groups_.sequence, block.first_group, block.groups};
  }

  struct Slot {
    Fetch fetch;
    Block block;
    PrefixPages listed;
  };

  PrefixReader& past_;
  PrefixReader::Groups groups_;
  PrefixBlocks blocks_;
  int current_ = 0;
  std::array<Slot, 2> slots_;
};

}  // namespace kvswap
