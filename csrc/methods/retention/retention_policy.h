#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "methods/retention/attention_spread.h"
#include "methods/retention/group_keys.h"
#include "methods/retention/top_tokens.h"

namespace kvswap {

/// What a retention policy is made of: settings, and the model's heads.
struct RetentionOptions {
  int64_t query_heads = 0;
  int64_t pool = 1;                   // neighbours whose scores a token's is the sum of
  double variance_weight = 0;         // of a token's attention, beside its mean
  double low_watermark = 1;           // of the retained tokens that stay where there is no room
  std::optional<double> ratio = 1.0;  // in the model's dtype where there is no room; none: OQ
  std::vector<double> preference_temperatures;
  std::vector<int64_t> scoring_heads;  // through all layers, rising; empty: all
};

/// The attention that a block's tokens received from the observed queries of one head.
struct HeadAttention {
  int64_t layer = 0;
  int64_t head = 0;     // a KV head, whose query heads are averaged, or scores_query_heads()
  int64_t samples = 1;  // that the sums are of
  std::span<const float> sums;          // [tokens]
  std::span<const float> squares = {};  // [tokens]: sums of squares; empty: not needed
};

/// The variance of one token's samples; 0 of one.
inline float sample_variance(const HeadAttention& attention, int64_t token) {
  const auto count = static_cast<float>(attention.samples);
  const float mean = attention.sums[token] / count;
  const float apart = std::max(0.0f, attention.squares[token] - attention.sums[token] * mean);
  return attention.samples > 1 ? apart / (count - 1) : 0.0f;
}

/// The scores of a block's tokens, where they stand among all of a sequence.
class BlockScores {
 public:
  /// positions: of the block's tokens; null: they follow one another from `first` on.
  BlockScores(float* scores, int64_t first, const int32_t* positions = nullptr)
      : scores_(scores), first_(first), positions_(positions) {}
  float& operator[](int64_t token) const {
    return scores_[positions_ == nullptr ? first_ + token : positions_[token]];
  }

 private:
  float* scores_;
  int64_t first_;
  const int32_t* positions_;
};

/// What a prompt says of a layer.
struct LayerPrompt {
  AttentionSpread spread;
  int64_t candidates = 0;  // tokens that it can retain
};

/// Where a policy's scores come from.
enum class ScoredBy {
  kAttention,  ///< what queries pay the tokens before them: of a prompt's end, and of steps
  kKeys,       ///< the keys of a prompt, once
  kUser,       ///< numbers that come with each append
};

class RetentionPolicy;

/// A line of the registry: what the engine must know of a policy to plan for it.
struct RetentionKind {
  const char* name;
  const char* source;        // the paper
  bool keeps_tokens = true;  // beside sinks and recent tokens
  ScoredBy scored_by = ScoredBy::kAttention;
  bool accumulates = false;  // attention is summed since the prompt; else since the last refresh
  /// Tokens are retained as they leave the tail. If there is no room, survivors() stay.
  bool retains_online = false;
  /// Layers differ in how many tokens they retain: divide() says it of each prompt.
  bool divides_layers = false;
  bool keeps_whole_groups = false;  // all tokens of a group score the same
  /// Null: it keeps no tokens.
  std::unique_ptr<const RetentionPolicy> (*make)(const RetentionOptions& options) = nullptr;

  static std::span<const RetentionKind* const> all();
  /// Null where there is none of that name.
  static const RetentionKind* find(const std::string& name);
};

/// Which tokens stay in memory and are attended, regardless of the query: a method's rule.
///
/// A policy only computes. The engine decides when a layer's set is chosen again
/// (RetentionManager), measures attention, reads keys and moves bytes. One file of this folder and
/// a line in retention_registry.cpp make a policy. Thread-safe: it has no state.
class RetentionPolicy {
 public:
  virtual ~RetentionPolicy() = default;

  /// Is each query head weighed for itself? Else the mean over those of each KV head.
  virtual bool scores_query_heads() const { return false; }
  /// Are sums of squares needed?
  virtual bool needs_squares() const { return false; }
  /// Adds what tokens score by the attention of one head; called for each head in turn.
  virtual void add_scores(const HeadAttention& attention, const BlockScores& scores) const;
  /// With ScoredBy::kKeys: what a group's tokens score. scores: [group_tokens] out.
  virtual void score_keys(const GroupKeys& group, std::span<float> scores) const;
  /// Of all tokens, once everything is added up: neighbours may share.
  virtual void smooth(std::span<float> scores) const { (void)scores; }
  /// Positions that are retained, the best first.
  virtual std::vector<int32_t> select(const RetainArgs& args) const { return by_attention(args); }

  /// With retains_online: those of the retained tokens that stay where there is no room, the best
  /// first.
  virtual std::vector<int32_t> survivors(std::span<const int32_t> positions,
                                         std::span<const float> scores) const;
  /// And so much of the room in the model's dtype, the rest in e4m3. quality, most: of this
  /// layer's prompt, and the largest of all layers; none: it was not measured.
  virtual double share_in_dtype(std::optional<double> quality, double most) const;

  /// With divides_layers: `total` tokens among those layers that the prompt has come to, none of
  /// which has more than its candidates. Layers come one after the other: one that comes leaves
  /// none of them more than before, so that fewer than `total` may be left.
  virtual std::vector<int64_t> divide(std::span<const LayerPrompt> layers, int64_t total) const;
};

/// RetentionKind::make of a policy that is made of its options.
template <typename Policy>
std::unique_ptr<const RetentionPolicy> make_retention(const RetentionOptions& options) {
  return std::make_unique<Policy>(options);
}

}  // namespace kvswap
