#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "engine/engine_context.h"
#include "engine/sequence/batch.h"
#include "engine/sequence/sealer.h"
#include "engine/step/layer_step.h"
#include "kernels/paged_attention.h"

namespace kvswap {

/// What was found out about one layer: shares of attention, each the mean of one look.
struct MissedMass {
  int64_t looks = 0;
  double sum = 0;
  double sum_of_squares = 0;

  void add(double share);
  double mean() const { return looks > 0 ? sum / static_cast<double>(looks) : 0; }
  /// Variance of the mean: looks are taken as independent. 0 before the second.
  double variance() const;
};

/// How much attention a step missed: now and then a layer also reads some groups that it did not
/// select, drawn at random, and attends them apart. Where clusters are selected groups are drawn of
/// those with tokens in no selected one, and these tokens are attended.
///
/// With L the log-sum-exp of what a head attended and l_j those of `r` of the `n` other groups, the
/// missed mass relative to what was attended is estimated by x = n/r sum_j exp(l_j - L), without
/// bias, and as a share of all by x / (1 + x), whose bias the jackknife takes away but for terms of
/// order 1/r^2. A look is the mean over heads and queries of one sequence; sequences take
/// refreshes, and layers look in different steps. The answer of the step is not touched. Not
/// thread-safe.
class RecallAudit {
 public:
  RecallAudit(EngineContext& context, const Batch& batch, Sealer& sealer)
      : context_(context), batch_(batch), sealer_(sealer), layers_(context.options.layers) {}

  /// Before a layer attends what `step` selected. If it is to be looked at, its reads begin, and
  /// log_sum_exp() is where attention must leave its own.
  Status begin(int64_t layer, const LayerStep& step, int64_t queries);
  float* log_sum_exp() { return is_looking_ ? attended_.data() : nullptr; }
  /// Afterwards, with the arguments of that attention: waits for the reads and counts what they
  /// tell. An error is the disk's, or a record's.
  Status finish(const PagedAttentionArgs& attended);

  const std::vector<MissedMass>& layers() const { return layers_; }

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan, const Extent& extent);

 private:
  bool is_due(int64_t layer);
  Status make_memory();
  void draw(const LayerStep& step);
  void draw_of_part(int64_t head, const std::vector<int32_t>& chosen);
  uint64_t left_out(int64_t sequence, int64_t group, const std::vector<int32_t>& chosen) const;
  void weigh(const PagedAttentionArgs& attended);
  double share_of(const float* log_sums, int64_t stride, float attended, int64_t sequence) const;

  EngineContext& context_;
  const Batch& batch_;
  Sealer& sealer_;
  std::vector<MissedMass> layers_;
  std::vector<int64_t> steps_;  // [layers]: that selected
  std::mt19937_64 random_{0x6b767377};

  // Of the look that is under way.
  bool is_looking_ = false;
  int64_t layer_ = 0;
  int64_t first_part_ = 0;             // of the sequence
  std::shared_ptr<std::byte> memory_;  // [audit_groups, heads_apart, record_bytes]
  Fetch fetch_;
  std::vector<const void*> pages_;   // [audit_groups, heads_apart]; null: fewer were left
  std::vector<uint64_t> masks_;      // the same
  std::vector<int32_t> positions_;   // the same
  std::vector<int32_t> counts_;      // the same: 1
  std::vector<int8_t> exponents_;    // [audit_groups, heads_apart, note_bytes]
  std::vector<int32_t> queries_at_;  // [audit_groups]
  std::vector<int64_t> drawn_;       // [heads_apart]: groups
  std::vector<int64_t> others_;      // [heads_apart]: groups that were not selected
  std::vector<int32_t> sample_;      // of one sequence
  std::vector<float> attended_;      // [batch, heads, queries]
  std::vector<float> log_sums_;      // [audit_groups, heads, queries]
  std::vector<std::byte> output_;    // [audit_groups, queries, heads, head_dim]: not used
};

}  // namespace kvswap
