#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "engine/engine_context.h"
#include "engine/prefill/prefix_reader.h"
#include "engine/retention/observation_block.h"
#include "engine/retention/token_eviction.h"
#include "engine/sequence/batch.h"
#include "methods/retention/arkv.h"
#include "methods/retention/retention_policy.h"
#include "methods/retention/top_k_overlap.h"

namespace kvswap {

/// Computes the exact attention of a sequence's observation window over all tokens before it.
///
/// Reads the layer's records once (SnapKV 4); twice if the log-sum-exps of the window's queries are
/// not known: first for these, then for the weights (PRKV algorithm 1). Of discarded records the
/// tokens that survive in memory count. Not thread-safe.
class ObservationScorer {
 public:
  ObservationScorer(EngineContext& context, Batch& batch, PrefixReader& past,
                    TokenEviction& eviction)
      : context_(context), batch_(batch), past_(past), eviction_(eviction), block_(context.plan) {}

  /// Adds to `mass` ([sealed tokens], or [tokens] if it is summed from refresh to refresh) the
  /// attention that each token received from the window's queries, summed over them. The
  /// RetentionPolicy says what tokens score by it. New tokens begin at 0. After an error a part of
  /// it is added. Also sets the sequence's RetainedTokens::quality, spread and overlap, if the
  /// settings ask for them.
  Status score(int64_t layer, int64_t sequence, std::vector<float>& mass);

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan);

 private:
  using MeetBlock = std::function<void(const PrefixReader::Groups&)>;
  /// A block of the prefix, and whose it is.
  struct Block {
    const ObservationWindow* window = nullptr;
    int64_t layer = 0;
    int64_t first_token = 0;
    const int32_t* positions =
        nullptr;            // of its tokens, all before the window; null: from the first
    float* mass = nullptr;  // of all tokens

    int64_t position(int64_t token) const {
      return positions == nullptr ? first_token + token : positions[token];
    }
    BlockScores scores() const { return {mass, first_token, positions}; }
    /// How many of so many tokens are before the window.
    int64_t before(int64_t tokens) const {
      return positions == nullptr ? std::min(tokens, window->first_position - first_token) : tokens;
    }
  };

  Status walk_sealed(int64_t layer, int64_t sequence, const MeetBlock& meet);
  Status walk_tail(int64_t layer, int64_t sequence, const MeetBlock& meet);
  int64_t end_group(const Batch::Layer& layer) const {
    const int64_t group_tokens = context_.options.group_tokens;
    return (layer.positions + group_tokens - 1) / group_tokens;
  }
  Status sum_past(int64_t layer, int64_t sequence);
  void sum_block(const ObservationWindow& window);
  void score_survivors(int64_t layer, int64_t sequence, Block block);
  void score_block(const Block& block);
  void score_each_head(const Block& block);
  void add_scores_of_head(const Block& block, int64_t kv_head, int64_t of_group);
  void score_query(const ObservationWindow& window, int64_t query, int64_t of_group);
  void score_overlap(const Block& block);
  void score_shape(const Block& block);
  /// Are means of each KV head wanted over all of a window, and their squares?
  bool scores_heads() const {
    return context_.retention.policy->needs_squares() || !context_.options.keep_ratio;
  }

  EngineContext& context_;
  Batch& batch_;
  PrefixReader& past_;
  TokenEviction& eviction_;

  std::vector<std::vector<std::byte>> tail_copies_;  // of a device: [tail_pages][group_bytes]
  std::vector<float> window_sums_;                   // [heads, queries]: log-sum-exps of a window
  std::optional<TopKOverlap> overlap_;
  AttentionShape shape_;    // of the window's attention to what is before it
  AttentionSpread spread_;  // the same
  // Of the block that is weighed.
  ObservationBlock block_;
  std::vector<float> log_sums_;    // [heads, queries] of a call
  std::vector<std::byte> output_;  // of attention whose log-sum-exps alone are wanted
  std::vector<float> mean_;        // [kv_heads, tokens] of a call
  std::vector<float> square_;
  std::vector<float> means_;    // of the calls for a window, or of one head's queries, summed up
  std::vector<float> squares_;  // the same
};

}  // namespace kvswap
