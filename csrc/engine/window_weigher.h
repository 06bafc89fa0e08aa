#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "engine/batch.h"
#include "engine/dropping.h"
#include "engine/engine_parts.h"
#include "engine/past_reader.h"
#include "engine/tail.h"
#include "engine/window_block.h"
#include "methods/keeper.h"
#include "methods/top_overlap.h"

namespace kvswap {

/// Finds out exactly what the queries of a part's window paid all tokens before them, by reading
/// the layer's records once (SnapKV 4, PRKV 3.4); twice where it is not known what each query
/// attended: for the sums of their softmax first, and for the weights (PRKV algorithm 1). Tokens
/// whose records are gone count with what is left of them. Not thread-safe.
class WindowWeigher {
 public:
  WindowWeigher(EngineParts& parts, Batch& batch, const Tail& tail, PastReader& past,
                Dropping& dropping)
      : parts_(parts),
        batch_(batch),
        tail_(tail),
        past_(past),
        dropping_(dropping),
        block_(parts.plan) {}

  /// Adds to mass, [sealed tokens], or where it is summed up from turn to turn [tokens], what each
  /// was paid by the window's queries, summed over them; where heads are weighed alone, what it is
  /// worth for that, see worth_of(). What it had not before counts as 0. After a failure there is
  /// some of it. Also to the part's kept
  /// tokens, where the settings ask for it: how unevenly the queries look, how that changes, and on
  /// how many tokens they agree (KeptTokens::quality, spread, overlap).
  Status weigh(int64_t layer, int64_t part, std::vector<float>& mass);

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan);

 private:
  using MeetBlock = std::function<void(const PastReader::Groups&)>;
  /// A block of the past, and whose it is.
  struct Block {
    const QueryWindow* window = nullptr;
    int64_t layer = 0;
    int64_t first_token = 0;
    const int32_t* positions =
        nullptr;            // of its tokens, all before the window; null: from the first
    float* mass = nullptr;  // of all tokens

    int64_t position(int64_t token) const {
      return positions == nullptr ? first_token + token : positions[token];
    }
    /// How many of so many tokens are before the window.
    int64_t before(int64_t tokens) const {
      return positions == nullptr ? std::min(tokens, window->first_position - first_token) : tokens;
    }
  };

  Status walk_sealed(int64_t layer, int64_t part, const MeetBlock& meet);
  Status walk_tail(int64_t layer, int64_t part, const MeetBlock& meet);
  int64_t end_group(const Batch::Layer& layer) const {
    const int64_t group_tokens = parts_.options.group_tokens;
    return (layer.positions + group_tokens - 1) / group_tokens;
  }
  Status sum_past(int64_t layer, int64_t part);
  void sum_block(const QueryWindow& window);
  void weigh_left(int64_t layer, int64_t part, Block block);
  void weigh_block(const Block& block);
  void weigh_each_head(const Block& block);
  void add_worth_of_head(const Block& block, int64_t kv_head);
  void weigh_one(const QueryWindow& window, int64_t query, int64_t of_group);
  bool is_asked(int64_t layer, int64_t head) const;
  void weigh_overlap(const Block& block);
  void weigh_shape(const Block& block);
  /// Are means of each KV head wanted over all of a window, and their squares?
  bool weighs_heads() const {
    return parts_.options.keep_variance > 0 || !parts_.options.keep_ratio;
  }
  /// Is each query head weighed for itself (CAKE, CompressKV)?
  static bool weighs_each(const Plan& plan) {
    return plan.keep.kind.prefers_layers || !plan.options.keep_heads.empty();
  }

  EngineParts& parts_;
  Batch& batch_;
  const Tail& tail_;
  PastReader& past_;
  Dropping& dropping_;

  std::vector<std::vector<std::byte>> tail_copies_;  // of a device: [tail_pages][group_bytes]
  std::vector<float> window_sums_;                   // [heads, queries]: log-sum-exps of a window
  std::optional<TopOverlap> overlap_;
  AttentionShape shape_;    // of the window's attention to what is before it
  AttentionSpread spread_;  // the same
  // Of the block that is weighed.
  WindowBlock block_;
  std::vector<float> log_sums_;    // [heads, queries] of a call
  std::vector<std::byte> output_;  // of attention whose log-sum-exps alone are wanted
  std::vector<float> mean_;        // [kv_heads, tokens] of a call
  std::vector<float> square_;
  std::vector<float> means_;    // of the calls for a window, or of one head's queries, summed up
  std::vector<float> squares_;  // the same
};

}  // namespace kvswap
