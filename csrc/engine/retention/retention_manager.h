#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine_context.h"
#include "engine/prefill/prefix_reader.h"
#include "engine/retention/key_scorer.h"
#include "engine/retention/layer_budgets.h"
#include "engine/retention/observation_scorer.h"
#include "engine/retention/online_retention.h"
#include "engine/retention/retained_pages.h"
#include "engine/retention/summary_exclusion.h"
#include "engine/retention/token_eviction.h"
#include "engine/retention/user_token_scores.h"
#include "engine/sequence/batch.h"
#include "engine/sequence/sealer.h"
#include "engine/step/step_attention.h"

namespace kvswap {

/// Decides when a layer's set of retained tokens is chosen again ("refreshed"), and by which
/// scores. Retained tokens stay in memory and are attended in every step, regardless of the query.
///
/// A RetentionPolicy scores tokens and picks those that stay; here it is found out what it scores:
///
///   after a prompt            ObservationScorer: attention of its newest queries over all tokens
///                             before them; reads the layer's records once
///   every `refresh_interval`  StepAttention: the same over the tokens that steps attended; reads
///     decoded tokens          nothing
///   ... of all tokens         ObservationScorer: reads the layer's records twice
///   ScoredBy::kKeys           KeyScorer: after a prompt, reads the layer's records once
///   ScoredBy::kUser           UserTokenScores: comes with each append, or anew of all tokens once
///                             tell_step() has said what a step attended
///
/// With keep_scores = disk refreshes are spread over layers, sequences and the interval, so that no
/// step reads all records. While all tokens fit in memory no set is chosen. With keep_share = auto
/// the refresh after a prompt decides how many tokens are retained, and as many groups fewer are
/// selected (PRKV G).
///
/// RetentionPlan says how many tokens a layer retains, or LayerBudgets if layers differ.
/// RetainedPages copies their bytes to pages of their own; their records stay on disk. Without a
/// disk TokenEviction discards the others. OnlineRetention retains tokens as they leave the tail.
/// SummaryExclusion rewrites the rows of groups without them (exclude_from_summary).
///
/// Errors: a refresh that fails keeps the old set, and the next call tries again. Not thread-safe.
/// Sources: SnapKV 4, PRKV 4.1 and algorithm 1, H2O 4, ARKV IV, ShadowKV 4.1.
class RetentionManager {
 public:
  RetentionManager(EngineContext& context, Batch& batch, Sealer& sealer, PrefixReader& past)
      : context_(context),
        batch_(batch),
        retained_pages_(context, batch, sealer, past),
        exclusion_(context, batch, sealer, past),
        eviction_(context, batch, retained_pages_),
        given_(context, batch),
        observation_(context, batch, past, eviction_),
        keys_(context, batch, past),
        budgets_(context, batch, retained_pages_),
        online_(context, batch, retained_pages_),
        step_(context, batch) {}

  UserTokenScores& given() { return given_; }
  TokenEviction& eviction() { return eviction_; }

  /// Of a long chunk's newest queries so many are to be observed; 0: none.
  int64_t window(int64_t layer) const;
  /// Where nothing of a chunk is observed, and a prompt decides all the same: it has ended.
  void note_chunk(int64_t layer, int64_t tokens);
  /// What they were, for the refresh that comes before the layer's next step.
  void observe_chunk(int64_t layer, int64_t sequence, RetainedTokens::Window window);

  /// Where the attention of a step that is to be observed must leave its own; null: it is not.
  float* log_sum_exp(int64_t layer, int64_t queries);
  /// Afterwards, with the arguments of that attention. A step that is made again since another
  /// layer failed counts once.
  Status observe_step(int64_t layer, const PagedAttentionArgs& attended);
  /// An error where a step of the layer cannot be asked for what tell_step() tells.
  Status check_tells(int64_t layer) const;
  /// Likewise, what each token received of the mean over the query heads of a KV head, and over the
  /// step's queries: [sequences, kv_heads, positions] out; 0 where a token was not attended.
  Status tell_step(int64_t layer, const PagedAttentionArgs& attended, float* received);

  /// Chooses anew where that is due, for a step whose first token stands at `position`. The layer's
  /// pages must not be planned for.
  Status refresh(int64_t layer, int64_t position);
  /// Where nothing is on disk, before a chunk that is not the first: what is due, unless it goes by
  /// queries that were cropped, which the chunk's own will replace.
  Status refresh_before_chunk(int64_t layer);

  /// What all of it allocates, but for what stands with the sequences (SequencePages) and grows
  /// with what they hold (MemoryReservations).
  static void reserve(Arena& arena, const Plan& plan, const Extent& extent);

 private:
  bool is_observed(const RetainedTokens& retained) const;
  bool is_due(int64_t layer, int64_t sequence, int64_t position) const;
  Status take_queries(int64_t layer, const PagedAttentionArgs& attended);
  void accumulate_attention(int64_t layer, int64_t sequence, int64_t queries,
                            const PagedAttentionArgs& attended);
  std::vector<float>& mass_of(RetainedTokens& retained);
  Status score(int64_t layer, int64_t sequence);
  Status choose(int64_t layer, int64_t sequence);
  Status refresh_sequence(int64_t layer, int64_t sequence);
  Status refresh_layers(int64_t layer, int64_t position);
  int64_t share_of(int64_t layer, int64_t sequence) const;
  void stagger(int64_t layer, int64_t sequence);

  EngineContext& context_;
  Batch& batch_;
  RetainedPages retained_pages_;
  SummaryExclusion exclusion_;
  TokenEviction eviction_;
  UserTokenScores given_;
  ObservationScorer observation_;
  KeyScorer keys_;
  LayerBudgets budgets_;
  OnlineRetention online_;
  StepAttention step_;
  std::vector<float> mass_;  // of a refresh, where it is not what is summed up between refreshes
  // Of a step on a device.
  std::vector<std::byte> queries_;
  std::vector<std::byte> sinks_;
};

}  // namespace kvswap
