#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/engine_context.h"
#include "engine/sequence/batch.h"
#include "engine/sequence/sealer.h"
#include "engine/sequence/token_codec.h"

namespace kvswap {

/// Where sealed groups that were read stand, and in which format.
struct PrefixPages {
  std::vector<const std::byte*> pages;  // [groups]
  std::vector<int8_t> exponents;        // [groups, kv_heads, 2], as PagedAttentionArgs; or empty
  std::vector<std::byte> sinks;         // some of them stand here
};

/// Memory that a past streams through.
struct PrefixBlocks {
  std::shared_ptr<std::byte> memory;  // keeps all of it
  std::array<std::byte*, 2> slots{};  // [groups, record_bytes]
  std::byte* room = nullptr;          // as large, for who unpacks a block; null: there is none
  int64_t groups = 0;
};

/// What `where` answers who asks for positions before `gone`.
Status dropped(const char* where, int64_t positions, int64_t gone);

/// Reads what the layers hold, outside of a step: sealed groups from the file, the rest from the
/// tail. Not thread-safe.
class PrefixReader {
 public:
  PrefixReader(EngineContext& context, const Batch& batch, Sealer& sealer)
      : context_(context), batch_(batch), sealer_(sealer) {}

  struct Groups {
    int64_t layer = 0;
    int64_t sequence = 0;
    int64_t first = 0;
    int64_t count = 0;
  };
  /// Begins to read sealed groups to `target` ([count, record_bytes], aligned to 4096); finish()
  /// waits for them and verifies. `fetch` stays where it is.
  Status start(const Groups& groups, std::byte* target, Fetch& fetch);
  Status finish(Fetch& fetch) { return context_.fetcher->finish(fetch); }
  /// Nobody will finish it; `memory` is kept as long as something may land there.
  void abandon(Fetch& fetch, std::shared_ptr<void> memory) {
    context_.fetcher->abandon(fetch, std::move(memory));
  }
  /// To `target`, a part of `memory`, which outlives the call where the disk hangs.
  Status load(const Groups& groups, std::byte* target, const std::shared_ptr<void>& memory);
  /// Records of any numbers, pages of clusters among them.
  struct Records {
    int64_t layer = 0;
    int64_t sequence = 0;
    std::span<const int64_t> ids;
  };
  /// As they stand in the file: to [count, stored_bytes].
  Status load_stored(const Records& records, std::byte* target,
                     const std::shared_ptr<void>& memory);

  /// Of groups that were read to `records`: those of e4m3 stay encoded; where records are rounded a
  /// sink's tokens are its own.
  Status list(const Groups& groups, const std::byte* records, PrefixPages& listed);
  /// A group's tokens in the model's dtype: in the pages, or decoded to `room` [group_bytes()].
  const std::byte* tokens(const PrefixPages& listed, int64_t index, std::byte* room) const;

  /// Blocks of Plan::past_block_groups, kept from call to call and charged as staging from the
  /// start. One holder at a time: a PrefixStream, a scorer of retained tokens, a crop, a save,
  /// read().
  Result<PrefixBlocks> blocks();
  static void reserve(Arena& arena, const Plan& plan) {
    arena.take(Use::kStaging, 2 * plan.past_block_groups * plan.record_bytes);
  }

  struct Positions {
    int64_t layer = 0;
    int64_t sequence = 0;
    int64_t begin = 0;
    int64_t end = 0;
  };
  /// Copies positions to arrays of the host, [kv_heads, end - begin, head_dim] of K and [kv_heads,
  /// end - begin, value_width()] of V.
  Status read(const Positions& positions, void* keys, void* values);

 private:
  Status load(Fetch& fetch, const std::shared_ptr<void>& memory);
  Status read_sealed(const Positions& positions, const TokenView& target);
  Status read_tail(const Positions& positions, const TokenView& target);
  void unpack(const std::byte* record, int64_t group, const Positions& positions,
              const TokenView& target) const;

  EngineContext& context_;
  const Batch& batch_;
  Sealer& sealer_;
  std::shared_ptr<std::byte> blocks_;
};

}  // namespace kvswap
