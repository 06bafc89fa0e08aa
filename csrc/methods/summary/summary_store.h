#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "io/saved_tensor.h"
#include "methods/summary/key_summary.h"
#include "methods/summary/summary_encoder.h"

namespace kvswap {

/// The summaries of all layers and sequences: stores the rows that SummaryEncoder makes, shares
/// them between sequences and with a fork, crops, counts, saves and loads them. Not thread-safe.
class SummaryStore {
 public:
  /// Both outlive it. memory: where summaries and projections live.
  SummaryStore(const MethodOptions& options, const SummaryEncoder& rows,
               std::shared_ptr<SummaryMemory> memory);

  /// Can the layer have some? What it lacks is a pair of projections; one that attends everything
  /// has none.
  bool is_ready(int64_t layer) const;
  /// Empty summaries for all sequences, where the layer can have some.
  void start_layer(int64_t layer);
  void set_sequences(int64_t sequences);
  /// Sequence i of the new batch shares the rows of sequence indices[i] of the old one.
  void select_sequences(std::span<const int64_t> indices);
  int64_t sequences() const { return sequences_; }

  const KeySummary& of(int64_t layer, int64_t sequence) const {
    return summaries_[layer][sequence];
  }
  /// Tokens summarised so far.
  int64_t tokens(int64_t layer) const;
  /// Bytes that append() of `tokens` to every sequence would allocate.
  int64_t bytes_to_append(int64_t layer, int64_t tokens) const;
  /// Makes room for the next sealed tokens of a sequence, whole groups; adds to `pieces` where
  /// their rows go. Where it fails the pieces before it are there.
  Status append(const SealedKeys& sealed, std::vector<SummarySlice>& pieces);
  /// Where the row of a group goes that is made again: the sequence's own from now on. Only where a
  /// row stands for a group.
  Result<SummarySlice> rewrite(const ChangedKeys& changed);
  /// Bytes that rewrite() of this group would allocate.
  int64_t bytes_to_rewrite(int64_t layer, int64_t sequence, int64_t group) const;
  void truncate(int64_t layer, int64_t tokens);

  /// What a layer keeps, to be saved: each chunk once, however many sequences share it, and for
  /// each sequence the numbers of its chunks. Stands until the summaries change.
  void list(int64_t layer, std::vector<SavedTensor>& tensors) const;
  /// Bytes that load() of `tokens` would allocate for a layer, whose projections are set.
  Result<int64_t> bytes_to_load(int64_t layer, int64_t tokens, const SavedTensors& saved) const;
  /// The summaries of a layer that has none yet, of `tokens` in each sequence.
  Status load(int64_t layer, int64_t tokens, const SavedTensors& saved);

  /// May others have them without a copy, and outlive these?
  bool is_shareable() const { return memory_->is_shareable(); }
  /// The summaries of a layer that has none yet: those of `other`, shareable ones of the same
  /// options, as they are. What one of the two appends later it appends to a copy of a last chunk.
  void share(int64_t layer, SummaryStore& other);
  /// Bytes that a layer's summaries hold.
  int64_t bytes(int64_t layer) const;
  /// Of all of them, shared ones included.
  int64_t resident_bytes() const { return memory_->live_bytes() - rows_.projection_bytes(); }
  /// Of resident_bytes(), what others count that share it.
  int64_t shared_bytes() const { return memory_->shared_bytes(); }

 private:
  KeySummary::Shape shape(int64_t layer) const;

  const MethodOptions& options_;
  const SummaryEncoder& rows_;
  std::shared_ptr<SummaryMemory> memory_;
  std::vector<std::vector<KeySummary>> summaries_;  // [layers][sequences]; none while not ready
  int64_t sequences_ = 0;
};

}  // namespace kvswap
