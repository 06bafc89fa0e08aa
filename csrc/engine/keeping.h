#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "engine/batch.h"
#include "engine/engine_parts.h"
#include "engine/past_reader.h"
#include "engine/sealer.h"
#include "engine/tail.h"
#include "kernels/attention_mass.h"
#include "methods/top_overlap.h"

namespace kvswap {

/// Tokens that stay in memory for what they were paid, whatever is asked later: who they are is
/// chosen anew at turns (SnapKV 4, PRKV 3.4).
///
/// A turn follows a prompt: what its newest `keep_window` queries paid all tokens before them is
/// found out exactly, by reading the layer's records once. While decoding one follows every
/// `keep_interval` tokens, by what the newest `keep_window` queries paid the tokens that they
/// attended, or by what all queries since the prompt did (H2O 4); with keep_scores=disk by what
/// those would pay all tokens, read twice: for the sums of their softmax, and for the weights
/// (weighing.cpp; PRKV algorithm 1). Kept tokens are copied to pages
/// of their own; on disk everything stays where it is. While everything fits, nobody is kept. A
/// turn that fails leaves the old set. With keep_share=auto a prompt's turn finds out how many
/// stay, and so many groups fewer are selected (PRKV G).
///
/// With a keeper whose KeeperKind::joins (joining.cpp) what leaves the tail is kept before the next
/// step, and a turn follows a step after which there is no room for it: of those kept a share
/// stays, by what that step paid them. Nothing is read for it. Where EngineOptions::keeps_float8()
/// the best of them keep the model's dtype and the next become e4m3, as many as there is room for
/// (ARKV IV-C; keep_count says what of), which they stay until a prompt's turn. Not thread-safe.
class Keeping {
 public:
  Keeping(EngineParts& parts, Batch& batch, const Tail& tail, Sealer& sealer, PastReader& past)
      : parts_(parts), batch_(batch), tail_(tail), sealer_(sealer), past_(past) {}

  /// Of a long chunk's newest queries so many are to be observed; 0: none.
  int64_t window(int64_t layer) const;
  /// What they were, for the turn that comes before the layer's next step.
  void observe_chunk(int64_t layer, int64_t part, KeptTokens::Window window);

  /// With a keeper whose KeeperKind::is_given: what the layer's newest tokens are worth. Each
  /// token's before the turn that it may be kept by.
  Status give_worth(int64_t layer, const GivenWorth& given);

  /// Chooses anew where that is due, for a step whose first token stands at `column`. The layer's
  /// pages must not be planned for.
  Status turn(int64_t layer, int64_t column);

  /// Where nothing is on disk (EngineOptions::drops()): drops the layer's records that no turn
  /// will ask for, but for those of its newest columns, which a crop may.
  void let_go(int64_t layer);
  /// There, before a chunk that is not the first: what is due, unless it goes by queries that were
  /// cropped, which the chunk's own will replace.
  Status turn_before_chunk(int64_t layer);
  /// What is left of the tokens whose records are gone: sinks and kept ones, in the model's dtype.
  /// Stands until the next call.
  struct Left {
    int64_t count = 0;
    std::vector<int32_t> columns;  // [pages, group_tokens]
    std::vector<std::byte> pages;  // [pages, group_bytes]: token i in slot i % group_tokens
  };
  const Left& left(int64_t layer, int64_t part);

  /// Where the attention of a step that is to be observed must leave its own; null: it is not.
  float* log_sum_exp(int64_t layer, int64_t queries);
  /// Afterwards, with the arguments of that attention. A step that is made again since another
  /// layer failed counts once.
  void observe_step(int64_t layer, const PagedAttentionArgs& attended);

  // What it allocates: for each layer of a sequence, for each of its groups, beside each of the
  // parts' sequences, for so many groups of any, and for all.
  static int64_t bytes_per_layer(const EngineOptions& apart, int64_t token_page_bytes);
  static int64_t bytes_per_group(const EngineOptions& apart);
  static int64_t sequence_bytes(const EngineOptions& apart);
  static int64_t turn_bytes(const EngineOptions& apart, int64_t groups);
  static int64_t fixed_bytes(const EngineOptions& apart, int64_t record_bytes);

  static constexpr int64_t kMassUnit = 1024;  // tokens by which the memory of their mass grows

 private:
  bool accumulates() const { return parts_.options.keeper_kind().accumulates; }
  bool is_given() const { return parts_.options.keeper_kind().is_given; }
  bool joins() const { return parts_.options.keeper_kind().joins; }
  bool is_observed(const KeptTokens& kept) const;
  Status check_told(int64_t layer, const KeptTokens& kept) const;
  bool is_due(int64_t layer, int64_t part, int64_t column) const;
  Status choose(int64_t layer, int64_t part);
  Status turn_of(int64_t layer, int64_t part);
  int64_t share_of(int64_t layer, int64_t part) const;
  Status adopt(int64_t layer, int64_t part, std::vector<int32_t> columns,
               std::vector<int32_t> float8 = {});
  void encode_kept(int64_t layer, int64_t part, std::span<const int32_t> columns,
                   std::vector<int8_t>& exponents);
  void count_queries(KeptTokens& kept, int64_t fresh);
  std::vector<float>& mass_of(KeptTokens& kept);
  Status weigh(int64_t layer, int64_t part, int64_t sealed);
  static void grow(std::vector<float>& mass, int64_t tokens);
  Status weigh_past(int64_t layer, int64_t part);
  void take_queries(int64_t layer, const PagedAttentionArgs& attended);
  using MeetBlock = std::function<void(const PastReader::Groups&)>;
  Status walk_sealed(int64_t layer, int64_t part, const MeetBlock& meet);
  void list_block(const PastReader::Groups& groups);
  PagedAttentionArgs asked(const KeptTokens::Window& window, int64_t first);
  Status sum_past(int64_t layer, int64_t part);
  void sum_block(const KeptTokens::Window& window);
  /// columns: of the listed tokens, all before the window; null: those of the groups.
  void weigh_block(const PastReader::Groups& groups, const int32_t* columns = nullptr);
  void weigh_overlap(const PastReader::Groups& groups);
  void weigh_shape(int64_t count);
  void weigh_left(int64_t layer, int64_t part);
  void forget_gone(int64_t layer, int64_t part, std::span<float> mass) const;
  void add_left(const std::byte* page, int64_t slot, int64_t column);
  Status gather(int64_t layer, int64_t part, std::span<const int32_t> columns);
  Status read_groups(int64_t layer, int64_t part, std::span<const int32_t> columns, size_t first,
                     size_t& end);
  void put(int64_t place, const std::byte* page, int64_t slot);
  void put_rounded(int64_t layer, int64_t part, int32_t column, int64_t place);
  /// Token `slot` of a page becomes token `place` of another.
  void copy_token(std::byte* target, int64_t place, const std::byte* page, int64_t slot) const;

  // Where tokens join.
  std::vector<int32_t> newcomers(int64_t layer, int64_t part, int64_t begin, int64_t end) const;
  /// What kept tokens take of keep_tokens.
  int64_t room_of(size_t in_dtype, size_t in_float8) const;
  bool lacks_room(int64_t layer, int64_t part) const;
  Status make_room(int64_t layer, int64_t part, std::span<const int32_t> fresh);
  double ratio(int64_t layer, int64_t part) const;
  /// Are a window's means of each KV head wanted, and their squares?
  bool weighs_heads() const {
    return parts_.options.keep_variance > 0 || !parts_.options.keep_ratio;
  }
  Status turn_after_prompt(int64_t layer, int64_t part);
  Status join(int64_t layer, int64_t part);
  Status append(int64_t layer, int64_t part, std::span<const int32_t> columns);
  const std::byte* page_in_tail(int64_t layer, int64_t part, int64_t group);
  void observe_kept(int64_t layer, const PagedAttentionArgs& attended);
  void choose_who_stays(int64_t layer, int64_t part, const PagedAttentionArgs& attended);

  EngineParts& parts_;
  Batch& batch_;
  const Tail& tail_;
  Sealer& sealer_;
  PastReader& past_;

  // Of the step or block that is weighed.
  std::vector<float> log_sums_;
  std::vector<float> mass_;  // of a turn, where it is not what is summed up between turns
  std::vector<float> mean_;
  std::vector<float> square_;
  std::vector<float> means_;    // of the calls for a window, summed up
  std::vector<float> squares_;  // the same
  std::optional<TopOverlap> overlap_;
  AttentionShape shape_;            // of the window's attention to what is before it
  std::vector<float> window_sums_;  // [heads, queries]: log-sum-exps of a window
  std::vector<std::byte> output_;   // of attention whose log-sum-exps alone are wanted
  PastPages listed_;
  std::vector<const void*> pages_;
  std::vector<uint64_t> masks_;
  std::vector<int32_t> columns_;
  int32_t page_count_ = 0;
  int32_t query_column_ = 0;
  // Of the turn that is made.
  std::vector<std::byte> gathered_;  // [kept_pages, group_bytes]
  std::vector<std::byte> decoded_;   // [group_bytes]
  Left left_;
  std::vector<std::byte> rounded_;    // [payload_bytes]: of records in e4m3, before that
  std::vector<std::byte> unencoded_;  // [group_bytes]
  std::vector<size_t> missing_;       // of the new columns, those that are to be read
  Fetch fetch_;
};

}  // namespace kvswap
