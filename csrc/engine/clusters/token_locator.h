#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/engine_context.h"
#include "engine/sequence/batch.h"
#include "engine/sequence/tail.h"
#include "engine/sequence/token_codec.h"

namespace kvswap {

/// Token `token` of a sequence's new ones.
TokenBytes token_of(const RecordShape& shape, const KeyValueView& tokens, int64_t sequence,
                    int64_t token);

/// Where the bytes of a row's tokens stand in memory: where they wait, in pages of the reuse
/// buffer, in pages that were read for it, or where they come from. For the time in which the layer
/// has no step. Not thread-safe.
class TokenLocator final : public KeySource {
 public:
  using Arriving = std::function<TokenBytes(int64_t token)>;
  TokenLocator(EngineContext& context, const Batch& batch, int64_t layer, int64_t sequence);

  /// Tokens that stand nowhere yet are there.
  void set_arriving(Arriving arriving) { arriving_ = std::move(arriving); }
  /// The page of the slot is there until forget_read().
  void add_read(int64_t slot, const std::byte* page) { read_[slot] = page; }
  void forget_read() { read_.clear(); }
  /// The slot holds something else now.
  void forget_read(int64_t slot) { read_.erase(slot); }

  ClusterRow& row() const { return row_; }
  SequencePages& pages() const { return batch_.pages(sequence_); }
  /// Null: it is not in memory.
  const std::byte* page(int64_t slot) const;
  bool is_in_memory(int64_t token) const;
  bool are_in_memory(std::span<const int64_t> tokens) const;
  /// Which of a cluster's pages are meant: all, or those that have room for more tokens.
  enum class Of { kAllPages, kPagesWithRoom };
  /// Sooner than are_in_memory() of what stands in them.
  bool has_pages_in_memory(int64_t cluster, Of pages) const;
  TokenBytes at(int64_t token) const;
  /// A page's token that waits.
  std::byte* waiting_page(int64_t place) const;

  /// As fp32; stands until forget_keys().
  const float* key(int64_t token) const override;
  void forget_keys() { keys_.clear(); }
  /// The same of one that is nowhere yet, to [width].
  void copy_key(const TokenBytes& token, float* target) const;

 private:
  EngineContext& context_;
  const Batch& batch_;
  int64_t layer_;
  int64_t sequence_;
  ClusterRow& row_;
  Arriving arriving_;
  std::unordered_map<int64_t, const std::byte*> read_;  // slot -> page
  mutable std::unordered_map<int64_t, std::unique_ptr<float[]>> keys_;
};

/// A token waits for its cluster no more: the last that does takes its place.
void end_wait(const RecordShape& shape, SequencePages& pages, int64_t layer, ClusterPages& row,
              int64_t token);

/// Slots that hold no token any more have no record any more.
void release_slots(EngineContext& context, SequencePages& pages, int64_t layer, int64_t sequence,
                   std::span<const int32_t> slots);

/// Tokens from this one on leave the clusters of a layer's sequences; pages that are empty since
/// are released.
void truncate_clusters(EngineContext& context, const Batch& batch, int64_t layer, int64_t tokens);

}  // namespace kvswap
