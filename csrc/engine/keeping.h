#pragma once

#include <cstdint>
#include <vector>

#include "engine/batch.h"
#include "engine/dropping.h"
#include "engine/engine_parts.h"
#include "engine/given_worths.h"
#include "engine/group_fits.h"
#include "engine/joining.h"
#include "engine/kept_pages.h"
#include "engine/layer_division.h"
#include "engine/past_reader.h"
#include "engine/sealer.h"
#include "engine/step_mass.h"
#include "engine/summary_exclusion.h"
#include "engine/tail.h"
#include "engine/window_weigher.h"

namespace kvswap {

/// Tokens that stay in memory for what they were paid, whatever is asked later: decides when they
/// are chosen anew, at turns (SnapKV 4, PRKV 3.4), and by what.
///
/// A turn follows a prompt: what its newest `keep_window` queries paid all tokens before them is
/// found out exactly (WindowWeigher). While decoding one follows every `keep_interval` tokens, by
/// what the newest `keep_window` queries paid the tokens that they attended (StepMass), or by what
/// all queries since the prompt did (H2O 4); with keep_scores=disk by what those would pay all
/// tokens, which WindowWeigher finds out, and turns of layers and sequences are spread over the
/// interval, so that no step reads all records; with a keeper whose KeeperKind::is_given by what
/// GivenWorths says; after a prompt with one that keeps outliers by what GroupFits does. Kept
/// tokens are copied to pages of their own (KeptPages); on disk everything stays where it is, and
/// where nothing is on disk Dropping says what is left. While everything fits, nobody is kept. A
/// turn that fails leaves the old set. With exclude_from_summary rows of groups leave kept tokens
/// out (SummaryExclusion). With keep_share=auto a prompt's turn finds out how many stay, and so
/// many groups fewer are selected (PRKV G). Where layers differ in how many they keep LayerDivision
/// says it. What leaves the tail joins those that are kept where the keeper says so (Joining). Not
/// thread-safe.
class Keeping {
 public:
  Keeping(EngineParts& parts, Batch& batch, const Tail& tail, Sealer& sealer, PastReader& past)
      : parts_(parts),
        batch_(batch),
        kept_pages_(parts, batch, tail, sealer, past),
        exclusion_(parts, batch, sealer, past),
        dropping_(parts, batch, kept_pages_),
        given_(parts, batch),
        weigher_(parts, batch, tail, past, dropping_),
        fits_(parts, batch, past),
        division_(parts, batch, kept_pages_),
        joining_(parts, batch, kept_pages_),
        step_(parts, batch) {}

  GivenWorths& given() { return given_; }
  Dropping& dropping() { return dropping_; }

  /// Of a long chunk's newest queries so many are to be observed; 0: none.
  int64_t window(int64_t layer) const;
  /// Where nothing of a chunk is observed, and a prompt decides all the same: it has ended.
  void note_chunk(int64_t layer, int64_t tokens);
  /// What they were, for the turn that comes before the layer's next step.
  void observe_chunk(int64_t layer, int64_t part, KeptTokens::Window window);

  /// Where the attention of a step that is to be observed must leave its own; null: it is not.
  float* log_sum_exp(int64_t layer, int64_t queries);
  /// Afterwards, with the arguments of that attention. A step that is made again since another
  /// layer failed counts once.
  Status observe_step(int64_t layer, const PagedAttentionArgs& attended);

  /// Chooses anew where that is due, for a step whose first token stands at `position`. The layer's
  /// pages must not be planned for.
  Status turn(int64_t layer, int64_t position);
  /// Where nothing is on disk, before a chunk that is not the first: what is due, unless it goes by
  /// queries that were cropped, which the chunk's own will replace.
  Status turn_before_chunk(int64_t layer);

  /// What all of it allocates, but for what stands with the sequences (SequencePages) and grows
  /// with what they hold (Account).
  static void reserve(Arena& arena, const Plan& plan, const Extent& extent);

 private:
  bool is_observed(const KeptTokens& kept) const;
  bool is_due(int64_t layer, int64_t part, int64_t position) const;
  Status take_queries(int64_t layer, const PagedAttentionArgs& attended);
  void add_paid(int64_t layer, int64_t part, int64_t queries, const PagedAttentionArgs& attended);
  std::vector<float>& mass_of(KeptTokens& kept);
  Status weigh(int64_t layer, int64_t part);
  Status choose(int64_t layer, int64_t part);
  Status turn_of(int64_t layer, int64_t part);
  Status turn_of_layers(int64_t layer, int64_t position);
  int64_t share_of(int64_t layer, int64_t part) const;
  void stagger(int64_t layer, int64_t part);

  EngineParts& parts_;
  Batch& batch_;
  KeptPages kept_pages_;
  SummaryExclusion exclusion_;
  Dropping dropping_;
  GivenWorths given_;
  WindowWeigher weigher_;
  GroupFits fits_;
  LayerDivision division_;
  Joining joining_;
  StepMass step_;
  std::vector<float> mass_;  // of a turn, where it is not what is summed up between turns
  // Of a step on a device.
  std::vector<std::byte> queries_;
  std::vector<std::byte> sinks_;
};

}  // namespace kvswap
