#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/batch.h"
#include "engine/engine_parts.h"
#include "engine/page_tokens.h"
#include "engine/sealer.h"

namespace kvswap {

/// Where sealed groups that were read stand, and in which format.
struct PastPages {
  std::vector<const std::byte*> pages;  // [groups]
  std::vector<int8_t> exponents;        // [groups, kv_heads, 2], as PagedAttentionArgs; or empty
  std::vector<std::byte> sinks;         // some of them stand here
};

/// Memory that a past streams through.
struct PastBlocks {
  std::shared_ptr<std::byte> memory;  // keeps all of it
  std::array<std::byte*, 2> slots{};  // [groups, record_bytes]
  std::byte* room = nullptr;          // as large, for who unpacks a block; null: there is none
  int64_t groups = 0;
};

/// What `where` answers who asks for positions before `gone`.
Status dropped(const char* where, int64_t positions, int64_t gone);

/// Reads what the layers hold, outside of a step: sealed groups from the file, the rest from the
/// tail. Not thread-safe.
class PastReader {
 public:
  PastReader(EngineParts& parts, const Batch& batch, const Tail& tail, Sealer& sealer)
      : parts_(parts), batch_(batch), tail_(tail), sealer_(sealer) {}

  struct Groups {
    int64_t layer = 0;
    int64_t sequence = 0;
    int64_t first = 0;
    int64_t count = 0;
  };
  /// Begins to read sealed groups to `target` ([count, record_bytes], aligned to 4096); finish()
  /// waits for them and verifies. `fetch` stays where it is.
  Status start(const Groups& groups, std::byte* target, Fetch& fetch);
  Status finish(Fetch& fetch) { return parts_.fetcher->finish(fetch); }
  /// Nobody will finish it; `memory` is kept as long as something may land there.
  void abandon(Fetch& fetch, std::shared_ptr<void> memory) {
    parts_.fetcher->abandon(fetch, std::move(memory));
  }
  /// To `target`, a part of `memory`, which outlives the call where the disk hangs.
  Status load(const Groups& groups, std::byte* target, const std::shared_ptr<void>& memory);
  /// Records of any numbers, pages of clusters among them.
  struct Records {
    int64_t layer = 0;
    int64_t sequence = 0;
    std::span<const int64_t> ids;
  };
  Status load(const Records& records, std::byte* target, const std::shared_ptr<void>& memory);

  /// Of groups that were read to `records`: those of e4m3 stay encoded; a sink's tokens are its
  /// own.
  Status list(const Groups& groups, const std::byte* records, PastPages& listed);
  /// A group's tokens in the model's dtype: in the pages, or decoded to `room` [group_bytes()].
  const std::byte* tokens(const PastPages& listed, int64_t index, std::byte* room) const;

  /// Blocks of Plan::past_block_groups, kept from call to call and charged as staging from the
  /// start; one PastStream at a time.
  Result<PastBlocks> blocks();
  static void reserve(Arena& arena, const Plan& plan) {
    arena.take(Use::kStaging, 2 * plan.past_block_groups * plan.record_bytes);
  }

  struct Positions {
    int64_t layer = 0;
    int64_t sequence = 0;
    int64_t begin = 0;
    int64_t end = 0;
  };
  /// Copies positions to [kv_heads, end - begin, head_dim] arrays of the host.
  Status read(const Positions& positions, void* keys, void* values);

 private:
  Status load(Fetch& fetch, const std::shared_ptr<void>& memory);
  Status read_sealed(const Positions& positions, const TokenView& target);
  Status read_tail(const Positions& positions, const TokenView& target);
  void unpack(const std::byte* record, int64_t group, const Positions& positions,
              const TokenView& target) const;

  EngineParts& parts_;
  const Batch& batch_;
  const Tail& tail_;
  Sealer& sealer_;
  std::shared_ptr<std::byte> blocks_;
};

}  // namespace kvswap
