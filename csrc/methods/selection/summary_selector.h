#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/types.h"
#include "methods/selection/attention_mass_scorer.h"
#include "methods/selection/logit_scorer.h"
#include "methods/selection/selector.h"
#include "methods/summary/summary_encoder.h"
#include "methods/summary/summary_store.h"

namespace kvswap {

/// Summaries of rows on the host, one choice for all heads, top-k of the groups' scores. Which rows
/// they are, and what a query becomes, is for SummaryEncoder to say; SummaryStore has them.
///
/// The score is the largest product in the group (KVSwap 3.3), in one stage or two (see
/// product_scorer.h); by mass, each head has its softmax over what may be chosen first (see
/// mass_scorer.h).
class SummarySelector : public Selector {
 public:
  /// memory: where summaries and projections live; the host's unless a sibling computes elsewhere.
  SummarySelector(const MethodOptions& options, std::unique_ptr<SummaryEncoder> rows,
                  std::shared_ptr<SummaryMemory> memory);

  bool is_ready(int64_t layer) const override { return summaries_.is_ready(layer); }
  Status set_projection(int64_t layer, int64_t rank, const float* keys,
                        const float* queries) override;
  void drop_projection(int64_t layer) override;
  int64_t projection_bytes() const override { return rows_->projection_bytes(); }
  void list_projections(int64_t layer, std::vector<SavedTensor>& tensors) const override {
    rows_->list(layer, tensors);
  }

  SummaryStore& summaries() override { return summaries_; }
  using Selector::append;
  Status append(std::span<const SealedKeys> sealed) override;
  Status rewrite(const ChangedKeys& changed) override;
  Status give_scores(int64_t layer, const UserScores& scores) override {
    return rows_->give(layer, scores);
  }
  void forget_scores() override { rows_->forget(); }
  void choose(const ChooseArgs& args) override;
  Status start_choice(const ChooseArgs& args) override;
  void clear() override;

 protected:
  const MethodOptions& options() const { return options_; }
  const SummaryEncoder& rows() const { return *rows_; }
  const KeySummary& summary(int64_t layer, int64_t sequence) const {
    return summaries_.of(layer, sequence);
  }
  int64_t sequences() const { return summaries_.sequences(); }
  virtual void write(int64_t layer, std::span<const SummarySlice> pieces);

 private:
  void run(int64_t count, const std::function<void(int64_t, int64_t)>& body) const;
  void score_by_product(const ChooseArgs& args);
  void score_by_mass(const ChooseArgs& args);
  void take_given(const ChooseArgs& args);
  /// Vectors asked for each query: one for all heads, or one a head.
  int64_t asked_a_query(const ChooseArgs& args) const {
    return options_.score == Score::kMax ? args.query.heads : 1;
  }
  void choose_for_sequence(const ChooseArgs& args, int64_t sequence);
  void drop_new(const float* scores, std::span<const int32_t> last, int64_t k, int64_t first,
                std::vector<int32_t>& chosen) const;
  float* group_scores(int64_t sequence, int64_t query) {
    return group_scores_.data() + (sequence * queries_ + query) * groups_;
  }

  const MethodOptions options_;
  const bool is_given_;  // SummaryKind's
  std::unique_ptr<SummaryEncoder> rows_;
  SummaryStore summaries_;

  // Scratch of choose(), kept so that a steady state allocates nothing.
  int64_t queries_ = 0;
  int64_t groups_ = 0;
  std::vector<float> asked_;  // [batch, queries, width], by mass [batch, queries, heads, width]
  std::vector<float> group_scores_;    // [batch, queries, groups]
  std::vector<ProductArgs> products_;  // [batch]
  LogitScorer scorer_;
  MassScorer mass_;
};

}  // namespace kvswap
