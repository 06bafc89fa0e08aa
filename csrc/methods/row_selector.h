#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/types.h"
#include "methods/mass_scorer.h"
#include "methods/rows.h"
#include "methods/selector.h"
#include "methods/summary.h"

namespace kvswap {

/// Summaries of rows on the host, one choice for all heads, top-k of the groups' scores. Which rows
/// they are, and what a query becomes, is for Rows to say.
///
/// The score is the largest product in the group (KVSwap 3.3); by mass, each head has its softmax
/// over what may be chosen first (see mass_scorer.h).
class RowSelector : public Selector {
 public:
  /// memory: where summaries and projections live; the host's unless a sibling computes elsewhere.
  RowSelector(const MethodOptions& options, std::unique_ptr<Rows> rows,
              std::shared_ptr<SummaryMemory> memory);

  bool is_ready(int64_t layer) const override;
  Status set_projection(int64_t layer, int64_t rank, const float* keys,
                        const float* queries) override;
  void drop_projection(int64_t layer) override;
  int64_t projection_bytes() const override { return rows_->projection_bytes(); }

  int64_t bytes_to_append(int64_t layer, int64_t tokens) const override;
  Status append(const SealedKeys& sealed) override;
  Status give_scores(int64_t layer, const GivenScores& scores) override {
    return rows_->give(layer, scores);
  }
  void choose(const ChooseArgs& args) override;
  Status start_choice(const ChooseArgs& args) override;
  void truncate(int64_t layer, int64_t tokens) override;
  int64_t tokens(int64_t layer) const override;
  void set_sequences(int64_t sequences) override;
  void select_sequences(std::span<const int64_t> indices) override;
  void clear() override;
  void list_projections(int64_t layer, std::vector<SavedTensor>& tensors) const override {
    rows_->list(layer, tensors);
  }
  void list_summaries(int64_t layer, std::vector<SavedTensor>& tensors) const override;
  Result<int64_t> bytes_to_load(int64_t layer, int64_t tokens,
                                const SavedTensors& saved) const override;
  Status load(int64_t layer, int64_t tokens, const SavedTensors& saved) override;
  bool is_shareable() const override { return memory_->is_shareable(); }
  void share(int64_t layer, Selector& other) override;
  int64_t summary_bytes(int64_t layer) const override;
  int64_t resident_bytes() const override { return memory_->live_bytes() - projection_bytes(); }
  int64_t shared_bytes() const override { return memory_->shared_bytes(); }

 protected:
  const MethodOptions& options() const { return options_; }
  const Rows& rows() const { return *rows_; }
  const Summary& summary(int64_t layer, int64_t sequence) const {
    return summaries_[layer][sequence];
  }
  int64_t sequences() const { return sequences_; }
  virtual void write(int64_t layer, std::span<const RowPiece> pieces);

 private:
  void run(int64_t count, const std::function<void(int64_t, int64_t)>& body) const;
  void score_by_product(const ChooseArgs& args);
  void score_by_mass(const ChooseArgs& args);
  void take_given(const ChooseArgs& args);
  void start_layer(int64_t layer);
  Summary::Shape summary_shape(int64_t layer) const;
  void score_chunk(const ChooseArgs& args, int64_t sequence, int64_t chunk);
  /// Vectors asked for each query: one for all heads, or one a head.
  int64_t asked_a_query(const ChooseArgs& args) const {
    return options_.score == Score::kMax ? args.query.heads : 1;
  }
  void choose_for_sequence(const ChooseArgs& args, int64_t sequence);
  float* group_scores(int64_t sequence, int64_t query) {
    return group_scores_.data() + (sequence * queries_ + query) * groups_;
  }

  MethodOptions options_;
  std::unique_ptr<Rows> rows_;
  std::shared_ptr<SummaryMemory> memory_;
  std::vector<std::vector<Summary>> summaries_;  // [layers][sequences]; none while not ready
  int64_t sequences_ = 0;

  // Scratch of choose(), kept so that a steady state allocates nothing.
  int64_t queries_ = 0;
  int64_t groups_ = 0;
  std::vector<float> asked_;  // [batch, queries, width], by mass [batch, queries, heads, width]
  std::vector<float> group_scores_;  // [batch, queries, groups]
  MassScorer mass_;
};

}  // namespace kvswap
