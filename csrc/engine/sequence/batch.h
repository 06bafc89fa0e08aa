#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/engine_context.h"
#include "engine/memory/memory_reservations.h"
#include "engine/sequence/sequence_pages.h"
#include "engine/sequence/sequence_pool.h"
#include "methods/selection/padding_mask.h"

namespace kvswap {

/// The sequences of a session (KV heads of them, with heads=each): their pages, which of their
/// positions count, and how far each layer has come.
///
/// A sequence that leaves the batch leaves its pages as a spare for the next one that comes; what
/// both take is charged by MemoryReservations. Not thread-safe.
class Batch {
 public:
  struct Layer {
    int64_t positions = 0;
    int64_t sealed_groups = 0;
    int64_t first_in_tail = 0;  // sealed groups from here on still stand in the tail's pages
    int64_t prefilled = 0;      // positions, the newest prefill's with all before it
  };

  Batch(EngineContext& context, MemoryReservations& account)
      : context_(context),
        account_(account),
        spares_(context, account.sequence()),
        layers_(context.options.layers) {}

  int64_t size() const { return static_cast<int64_t>(pages_.size()); }
  SequencePool& spares() { return spares_; }
  Layer& layer(int64_t index) { return layers_[index]; }
  const Layer& layer(int64_t index) const { return layers_[index]; }
  /// The layer has so many positions now, the newest in the tail.
  void grow(int64_t layer, int64_t positions);
  SequencePages& pages(int64_t sequence) const { return *pages_[sequence]; }
  const PaddingMask& validity(int64_t sequence) const { return validity_[sequence]; }

  /// `sequences` empty ones, whose context will be `tokens` long at least.
  Status begin(int64_t sequences, int64_t tokens);
  /// Validity of the next positions: [size(), tokens], a row for all heads that are apart.
  void declare(int64_t tokens, const bool* valid);
  /// Positions that nobody declared are valid.
  void declare_valid(int64_t positions);
  /// Sequence i of the new batch continues indices[i] of the old one.
  void select(std::span<const int64_t> indices);
  /// Calls with each sequence's, to be changed.
  template <typename Change>
  void change_validity(const Change& change) {
    for (int64_t sequence = 0; sequence < size(); ++sequence) change(sequence, validity_[sequence]);
  }
  void clear();

  /// Groups that stand in the tail and will leave it, once the layer has `positions`.
  int64_t due_groups(int64_t layer, int64_t positions) const;
  /// Bit i: token i of the group is there and counts.
  uint64_t mask(int64_t layer, int64_t sequence, int64_t group) const;
  /// The same of a sealed group, but for the retained tokens, which are attended anyway.
  uint64_t selectable(int64_t layer, int64_t sequence, int64_t group) const;
  /// Must the group be pinned when it is sealed?
  bool is_sink(int64_t sequence, int64_t group) const;
  /// Tokens on disk that a step can attend only by choosing them: neither padding, nor sinks, nor
  /// kept. None while everything fits.
  int64_t tokens_apart(int64_t layer, int64_t sequence) const;
  bool is_pinned(int64_t layer, int64_t sequence, int64_t group) const;
  /// Can all that may be chosen be attended at once?
  bool fits(int64_t layer, int64_t sequence) const {
    return fits(layer, sequence, layers_[layer].sealed_groups);
  }
  /// The same once so many groups are sealed.
  bool fits(int64_t layer, int64_t sequence, int64_t sealed) const;
  bool all_fit(int64_t layer) const;
  /// Must the layer attend everything, and has not all of it in pages? Then its steps restore the
  /// rest from disk.
  bool is_restored(int64_t layer) const { return context_.plan.is_exact(layer) && !all_fit(layer); }
  /// All groups that may be chosen among the first `groups`.
  void choosable(int64_t layer, int64_t sequence, int64_t groups,
                 std::vector<int32_t>& chosen) const;

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan, const Extent& extent);

 private:
  EngineContext& context_;
  MemoryReservations& account_;
  SequencePool spares_;
  std::vector<std::unique_ptr<SequencePages>> pages_;  // [size()]
  std::vector<PaddingMask> validity_;                  // [size()]
  std::vector<Layer> layers_;
};

}  // namespace kvswap
