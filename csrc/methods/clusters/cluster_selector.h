#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "methods/clusters/cluster_store.h"
#include "methods/selection/selector.h"
#include "methods/summary/mean_encoder.h"
#include "methods/summary/null_encoder.h"
#include "methods/summary/summary_store.h"

namespace kvswap {

/// Chooses clusters by their centroids (DynaKV 2.1): in falling score, of equal ones the lower
/// number first, until one does not fit in the pages that a query may have. Where the first does
/// not, it gets as many of its pages as fit.
///
/// The score is the product of the centroid with the sum of all heads' queries, or the largest with
/// any head's; by mass each head has its softmax over all clusters, a cluster counting as often as
/// it has tokens, and a cluster is worth what heads pay it together, or what the head pays that
/// pays most. What is chosen are slots: of slot s the number is page_id(s).
class ClusterSelector final : public Selector {
 public:
  explicit ClusterSelector(const MethodOptions& options);

  ClusterStore& rows() { return rows_; }
  const ClusterStore& rows() const { return rows_; }

  bool is_ready(int64_t layer) const override { return rows_.has(layer); }
  Status set_projection(int64_t layer, int64_t rank, const float* keys,
                        const float* queries) override;
  void drop_projection(int64_t) override {}
  int64_t projection_bytes() const override { return 0; }
  void list_projections(int64_t, std::vector<SavedTensor>&) const override {}
  Status give_scores(int64_t layer, const UserScores& scores) override;
  /// Empty ones: centroids stand in rows().
  SummaryStore& summaries() override { return summaries_; }
  /// Nothing: tokens enter clusters when their bytes are at hand.
  Status append(std::span<const SealedKeys>) override { return Status::ok(); }
  Status rewrite(const ChangedKeys&) override { KVSWAP_ASSERT(false); }
  void choose(const ChooseArgs& args) override;
  void clear() override;

  /// Scratch of a choice, of a batch whose rows have so many clusters.
  static int64_t scratch_bytes(const MethodOptions& options, int64_t batch, int64_t clusters);

 private:
  int64_t asked_a_query() const { return options_.score == Score::kSum ? 1 : options_.heads; }
  void choose_for(const ChooseArgs& args, int64_t sequence) const;
  void score(const ClusterRow& row, const float* asked, std::vector<float>& scores) const;

  const MethodOptions options_;
  NullEncoder none_;
  MeanEncoder centroids_;  // of all heads' keys, as means of groups are
  SummaryStore summaries_;
  ClusterStore rows_;
  std::vector<float> asked_;  // [batch, queries, asked_a_query, width]
};

/// How slot s of a cluster is named where groups are named: no group has a negative number.
constexpr int32_t page_id(int64_t slot) { return static_cast<int32_t>(~slot); }
constexpr bool is_page_id(int64_t group) { return group < 0; }
constexpr int64_t slot_of_page(int64_t id) { return ~id; }

}  // namespace kvswap
