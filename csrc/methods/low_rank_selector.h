#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/project.h"
#include "kernels/types.h"
#include "methods/mass_scorer.h"
#include "methods/selector.h"
#include "methods/summary.h"

namespace kvswap {

struct LowRankOptions {
  int64_t layers = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t group_tokens = 0;
  DType summary_dtype = DType::kFloat32;
  Score score = Score::kSum;
  const ParallelFor* parallel = nullptr;  // null: serial
};

/// KVSwap's selector (3.2, 3.3): low-rank keys, one choice for all heads, top-k of the groups'
/// scores. The paper's score is the sum over heads of the approximate products, max within the
/// group; by mass, each head has its softmax over all keys first (see mass_scorer.h).
///
/// A layer works once it has its pair of projections; the paper's method is the case where both
/// are the same.
class LowRankSelector : public Selector {
 public:
  /// memory: where summaries and projections live; the host's unless a sibling computes elsewhere.
  explicit LowRankSelector(const LowRankOptions& options,
                           std::shared_ptr<SummaryMemory> memory = make_host_summary_memory());

  bool has_projection(int64_t layer) const { return layers_[layer].rank > 0; }
  int64_t rank(int64_t layer) const { return layers_[layer].rank; }
  /// Both [kv_heads * head_dim, rank], copied. Only while the layer has no rows.
  Status set_projection(int64_t layer, int64_t rank, const float* keys, const float* queries);
  /// Forgets the projections and the summaries made with them.
  void drop_projection(int64_t layer);
  int64_t projection_bytes() const;

  int64_t bytes_to_append(int64_t layer, int64_t tokens) const override;
  Status append(int64_t layer, int64_t sequence, const KeyView& keys, int64_t tokens) override;
  void choose(const ChooseArgs& args) override;
  void truncate(int64_t layer, int64_t tokens) override;
  int64_t tokens(int64_t layer) const override;
  void set_sequences(int64_t sequences) override;
  void select_sequences(std::span<const int64_t> indices) override;
  void clear() override;
  int64_t resident_bytes() const override { return memory_->live_bytes() - projection_bytes(); }

  /// Largest chunk of at most 1024 tokens that holds whole blocks of 16 and whole groups.
  static int64_t chunk_tokens(int64_t group_tokens);

 protected:
  struct Layer {
    int64_t rank = 0;
    std::shared_ptr<std::byte> projections;  // both, [kv_heads * head_dim, rank] each
    std::vector<Summary> summaries;          // [sequences]
  };

  const LowRankOptions& options() const { return options_; }
  const Layer& layer(int64_t index) const { return layers_[index]; }
  int64_t sequences() const { return sequences_; }
  const float* key_projection(const Layer& layer) const {
    return reinterpret_cast<const float*>(layer.projections.get());
  }
  const float* query_projection(const Layer& layer) const {
    return key_projection(layer) + options_.kv_heads * options_.head_dim * layer.rank;
  }
  virtual void project(std::span<const ProjectKeysArgs> pieces);

 private:
  void run(int64_t count, const std::function<void(int64_t, int64_t)>& body) const;
  void score_by_sum(const ChooseArgs& args);
  void score_by_mass(const ChooseArgs& args);
  void project_queries(const ChooseArgs& args);
  void project_each_head(const ChooseArgs& args);
  void score_chunk(const ChooseArgs& args, int64_t sequence, int64_t chunk);
  void choose_for_sequence(const ChooseArgs& args, int64_t sequence);
  float* group_scores(int64_t sequence, int64_t query) {
    return group_scores_.data() + (sequence * queries_ + query) * groups_;
  }

  LowRankOptions options_;
  std::shared_ptr<SummaryMemory> memory_;
  std::vector<Layer> layers_;
  int64_t sequences_ = 0;

  // Scratch of choose(), kept so that a steady state allocates nothing.
  int64_t queries_ = 0;
  int64_t groups_ = 0;
  std::vector<float> projected_;  // [batch, queries, rank], by mass [batch, queries, heads, rank]
  std::vector<float> group_scores_;  // [batch, queries, groups]
  std::vector<float> kept_;          // [batch, heads, queries]: log-sum-exp of what is kept
  MassScorer mass_;
};

}  // namespace kvswap
