#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>

#include "engine/engine_context.h"
#include "engine/memory/memory_reservations.h"
#include "engine/sequence/batch.h"
#include "engine/sequence/tail.h"

namespace kvswap {

/// Groups leave the tail, or a long chunk, for the disk: packed in the outbox, entered in the
/// store's tables, summarised, pinned where they are sinks, and handed to the writer. Records of
/// e4m3 are encoded on the way; summaries and sinks are made of what they are encoded from.
///
/// States of a run: staged -> entered -> sent -> handed over. Between entered and handed over its
/// bytes may still be on a device: drain() comes before anything of it is read or truncated.
/// Not thread-safe.
class Sealer {
 public:
  Sealer(EngineContext& context, Batch& batch, MemoryReservations& account)
      : context_(context), batch_(batch), account_(account) {}

  /// Seals what has left the tail, of all sequences or of none.
  Status seal_overflow(int64_t layer);
  /// The oldest group of the tail.
  Status seal_from_tail(int64_t layer);
  /// `groups` whole groups of a chunk, from its token `first_token` on.
  Status seal_directly(int64_t layer, const KeyValueView& tokens, int64_t first_token,
                       int64_t groups);
  /// Forgets what was sealed from group `groups` on, and of the retained tokens what is behind the
  /// layer's positions: what is left of it stands in the tail again.
  void roll_back(int64_t layer, int64_t groups);

  /// Everything sealed is with the writer; the first error of those on their way.
  Status drain();
  /// The same, where something of this layer is on its way.
  Status drain_layer(int64_t layer);

  /// In a forked child, which has no device whose memory it could free.
  void leave_memory() { (void)unencoded_.release(); }

  /// The keys of a record, where it stands.
  KeyView keys_of(const std::byte* record) const;

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan);

 private:
  Result<RecordStore::StagedRun> stage(int64_t layer, int64_t count);
  Status commit(RecordStore::StagedRun run, std::span<const int64_t> sequences);
  Status hand_over_oldest();
  Status seal_run_from_tail(int64_t layer, int64_t first_sequence, int64_t count);
  Status seal_run_of_chunk(int64_t layer, int64_t sequence, int64_t first_group, int64_t count,
                           const KeyValueView& tokens, int64_t first_token);
  struct Piece {
    int64_t layer = 0;
    int64_t sequence = 0;
    int64_t first_group = 0;
    int64_t first_token = 0;  // of the chunk
    int64_t count = 0;        // groups
  };
  /// To pages of `stride` bytes, and sinks from there to theirs.
  void pack(const KeyValueView& tokens, const Piece& piece, std::byte* pages, int64_t stride);
  void pack_and_encode(RecordStore::StagedRun& run, const KeyValueView& tokens, const Piece& piece);
  Status make_unencoded();
  void encode(RecordStore::StagedRun& run, int64_t first, std::span<const void* const> pages);
  void pin_if_sink(int64_t layer, int64_t sequence, int64_t group, const std::byte* record);

  EngineContext& context_;
  Batch& batch_;
  MemoryReservations& account_;
  std::deque<RecordStore::StagedRun> sent_;  // on their way from the device, oldest first
  std::unique_ptr<PagePool> unencoded_;      // of a long chunk, what is encoded next
};

}  // namespace kvswap
