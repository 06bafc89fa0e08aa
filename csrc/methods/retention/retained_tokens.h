#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "methods/retention/attention_spread.h"
#include "methods/retention/observation_window.h"

namespace kvswap {

inline constexpr int64_t kMassUnit = 1024;  // tokens by which the memory of their mass grows

/// So many numbers at least, new ones 0, in memory that grows by kMassUnit.
void grow_mass(std::vector<float>& mass, int64_t tokens);

/// Of one sequence and layer: which tokens are retained, and what the next choice will be made of.
class RetainedTokens {
 public:
  /// The queries at the end of a long chunk, until what they attend is found out. Where steps are
  /// told them too, the newest of all.
  using Window = ObservationWindow;
  Window window;
  std::vector<float> mass;    // [tokens]: seen so far, or given
  bool begins_anew = false;   // the next attention is the first of `mass`, which is overwritten
  std::vector<float> decay;   // [tokens] that comes with it
  int64_t queries_since = 0;  // decoded since the last choice
  bool is_staggered = false;  // and counted from where that of others is not
  int64_t seen_positions =
      0;  // the attention received by the queries before here is in `mass` or `window`
  bool is_due = false;     // a choice
  int64_t due_from = 0;    // with so many positions: a step that is made again had none before it
  int64_t due_begin = -1;  // of the chunk that made it due; -1: steps did
  /// Chosen, and not gathered yet, the best first where it is not known how many stay; where tokens
  /// join, which tokens stay if there is no room, the best first.
  std::optional<std::vector<int32_t>> next;
  /// What stood before that chunk, for when it is cut.
  struct Before {
    std::optional<int64_t> due_from;
    std::optional<std::vector<int32_t>> next;
    std::optional<double> overlap;
    bool begins_anew = false;
  };
  Before before;
  /// Rising: what rows of groups leave out, where they leave retained tokens out. Those that are
  /// kept, without groups whose rows are yet to be made again.
  std::vector<int32_t> excluded;
  int64_t admitted_positions = 0;  // sealed ones before here had their chance to be kept

  // Of the newest prompt, where they are asked for.
  std::optional<double> quality;
  std::optional<double> overlap;  // TopKOverlap::mean()
  std::optional<AttentionSpread> spread;

  // Where layers differ in how many tokens are retained.
  std::vector<int32_t> ranked;  // those that are, the best first
  int64_t candidates = 0;       // for the newest choice

  /// In the model's dtype, rising. Token i stands in slot i % group_tokens of retained page
  /// i / group_tokens.
  const std::vector<int32_t>& positions() const { return positions_; }
  /// In e4m3, rising, in pages of their own.
  const std::vector<int32_t>& float8() const { return float8_; }
  const std::vector<int8_t>& exponents() const { return exponents_; }  // [pages, kv_heads, 2]
  int64_t count() const { return static_cast<int64_t>(positions_.size() + float8_.size()); }
  /// A long chunk came, from that position on: a choice follows.
  void note_chunk(int64_t begin);
  /// `fresh` queries were decoded; a choice follows every `interval` of them, 0: none.
  void count_queries(int64_t fresh, int64_t interval);
  /// Where no choice is needed: where one would have followed, the attention received before
  /// counts no more. keeps_window: what a prompt's queries see stays.
  void skip_refresh(int64_t interval, bool keeps_window);
  /// What was chosen is kept, and what was sealed before there had its chance.
  void end_refresh(int64_t sealed_positions);
  /// What those in e4m3 are, before set().
  void set_float8(std::vector<int32_t> positions, std::vector<int8_t> exponents);
  void set(std::vector<int32_t> positions, int64_t group_tokens);
  /// Bit i: position first + i is kept. count <= 64.
  uint64_t mask(int64_t first, int64_t count) const;
  /// Groups of retained tokens alone, rising: there is nothing to select in them.
  const std::vector<int32_t>& whole_groups() const { return whole_groups_; }
  /// Where a sequence is cut.
  struct Cut {
    int64_t positions = 0;
    int64_t sealed = 0;  // of them, those on disk: others cannot be kept
    int64_t group_tokens = 0;
    int64_t step = 0;  // positions that one step may have
  };
  /// Forgets what is cut. The attention received within the newest step stays: where that step
  /// failed and is made again, its queries have counted already. A choice that a chunk made due
  /// stays due while the chunk does, or while nothing is kept: its queries are better than none.
  void truncate(const Cut& cut);

 private:
  void undo_chunk();

  std::vector<int32_t> positions_;
  std::vector<int32_t> float8_;
  std::vector<int8_t> exponents_;
  std::vector<uint64_t> bits_;  // of both
  std::vector<int32_t> whole_groups_;
};

}  // namespace kvswap
