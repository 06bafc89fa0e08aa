#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "methods/summary/summary_encoder.h"
#include "methods/summary/summary_memory.h"

namespace kvswap {

/// KVSwap's rows (3.2, 3.3): K A_k of each token, all heads together; asked with the sum of the
/// heads' A_q^T q. Any linear map of keys and queries is of this kind.
///
/// Where KV heads are sequences of their own, each has its own part of the projections: the rows of
/// its own channels.
///
/// A layer is ready once it has its pair of projections; the paper's method is the case where both
/// are the same.
class LowRankEncoder final : public SummaryEncoder {
 public:
  /// memory: where the projections live, beside the rows.
  LowRankEncoder(const MethodOptions& options, std::shared_ptr<SummaryMemory> memory)
      : options_(options), memory_(std::move(memory)), layers_(options.layers) {}
  static SummaryShape shape_of(const MethodOptions& options, int64_t layer) {
    return {.width = options.ranks.at(layer), .tokens_per_row = 1};
  }
  static std::unique_ptr<SummaryEncoder> make(const MethodOptions& options,
                                              const std::shared_ptr<SummaryMemory>& memory) {
    return std::make_unique<LowRankEncoder>(options, memory);
  }

  SummaryShape shape(int64_t layer) const override { return {layers_[layer].rank, 1}; }
  bool is_ready(int64_t layer) const override { return layers_[layer].rank > 0; }
  void write(int64_t layer, const SummarySlice& piece) const override;
  void ask(int64_t layer, const QueryView& query, int64_t batch, float* asked) const override;
  void ask_each_head(int64_t layer, const QueryView& query, int64_t batch, float scale,
                     float* asked) const override;

  /// Both [heads_apart * kv_heads * head_dim, rank], copied.
  Status set_projection(int64_t layer, int64_t rank, const float* keys,
                        const float* queries) override;
  void drop_projection(int64_t layer) override { layers_.at(layer) = {}; }
  int64_t projection_bytes() const override;
  void list(int64_t layer, std::vector<SavedTensor>& tensors) const override;

  /// [kv_heads * head_dim, rank]; of sequence 0 those of all heads apart, one after the other. With
  /// int4 rows in scratch of the calling thread, until it asks again, and of the sequence alone.
  const float* key_projection(int64_t layer, int64_t sequence) const {
    return as_floats(layer, sequence % options_.heads_apart * part_size(layer), part_size(layer));
  }
  const float* query_projection(int64_t layer, int64_t sequence) const {
    const int64_t first = options_.heads_apart + sequence % options_.heads_apart;
    return as_floats(layer, first * part_size(layer), part_size(layer));
  }

 private:
  int64_t part_size(int64_t layer) const {
    return options_.kv_heads * options_.head_dim * layers_[layer].rank;
  }
  DType dtype() const { return projection_dtype(options_.summary_dtype); }
  const float* as_floats(int64_t layer, int64_t first, int64_t count) const;

  struct Layer {
    int64_t rank = 0;
    std::shared_ptr<std::byte> projections;  // both, [heads_apart * kv_heads * head_dim, rank];
                                             // of dtype()
  };

  MethodOptions options_;
  std::shared_ptr<SummaryMemory> memory_;
  std::vector<Layer> layers_;
};

}  // namespace kvswap
