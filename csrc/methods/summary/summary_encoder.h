#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/saved_tensor.h"
#include "io/status.h"
#include "kernels/types.h"
#include "methods/clusters/adaptive_clusters.h"
#include "methods/selection/selector.h"

namespace kvswap {

/// What a method is made for: the model, and the settings of its parts.
struct MethodOptions {
  std::string rows = "low_rank";  // of SummaryKind::all()
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t heads_apart = 1;  // sequence s is head s % heads_apart of the model's: see QueryView
  int64_t group_tokens = 0;
  std::vector<int64_t> ranks = {};         // [layers]: low_rank only, else empty
  std::vector<int64_t> exact_layers = {};  // attend everything: they have no summary
  DType summary_dtype = DType::kFloat32;
  Score score = Score::kSum;              // by mass low_rank only
  ClusterOptions clusters = {};           // centroid only
  int64_t score_columns = 0;              // of two stages: see LogitScorer; 0: one, all columns
  double score_share = 0;                 // of the blocks, scored in the second
  double bound_weight = 1;                // of half widths: box only
  double new_group_ratio = 1;             // of the best, where groups are new: see Candidates
  const ParallelFor* parallel = nullptr;  // null: serial

  /// Columns of a row of so many that are read for every group, where that is not all; else 0.
  int64_t first_columns(int64_t width) const { return score_columns < width ? score_columns : 0; }
};

/// The size of a layer's rows.
struct SummaryShape {
  int64_t width = 0;           // numbers a row
  int64_t tokens_per_row = 1;  // 1, or group_tokens
};

/// Sealed tokens that become rows of one chunk of a summary.
struct SummarySlice {
  int64_t sequence = 0;
  KeyView keys;        // of the piece's first token
  int64_t tokens = 0;  // whole groups where a row stands for a group
  const PaddingMask* valid = nullptr;
  int64_t first_token = 0;  // its position, for `valid`
  std::optional<uint64_t> counted =
      {};                      // of a single group, in the place of `valid`: bit t: token t
  std::byte* rows = nullptr;   // [blocks, width - rest_columns, 16] of the summary's dtype; int4 in
                               // half the bytes
  std::byte* rest = nullptr;   // [blocks, rest_columns, 16]
  int64_t rest_columns = 0;    // low_rank only
  float* row_scale = nullptr;  // [blocks, 16]: int8 and int4 only
  int64_t first_row = 0;
};

/// What stays in memory of sealed tokens, and what a query becomes to score it: a row's score is
/// its inner product with the asked vector, so that one kernel scores the rows of every method.
///
/// Only computes, but for what it needs beside the rows (projections). SummaryStore stores the
/// rows, shares them between sequences, crops and counts them. Not thread-safe, but for write().
class SummaryEncoder {
 public:
  virtual ~SummaryEncoder() = default;
  virtual SummaryShape shape(int64_t layer) const = 0;
  /// Can rows of this layer be made, and be asked?
  virtual bool is_ready(int64_t) const { return true; }
  virtual void write(int64_t layer, const SummarySlice& piece) const = 0;
  /// asked: [batch, queries, width], batch of `query` rows of head_dim each.
  virtual void ask(int64_t layer, const QueryView& query, int64_t batch, float* asked) const = 0;
  /// The same for each head apart, times `scale`: [batch, queries, heads, width]. Only where
  /// SummaryKind::scores_by_mass, or where a group is worth its best head.
  virtual void ask_each_head(int64_t layer, const QueryView& query, int64_t batch, float scale,
                             float* asked) const;

  /// Only where SummaryKind::is_given, in the place of asking: what the layer's next choice is made
  /// of. take() forgets it.
  virtual Status give(int64_t layer, const UserScores& scores);
  /// Was give() called for as many?
  virtual bool holds(int64_t, const UserScores&) const { return false; }
  virtual void take(int64_t layer, std::span<float> scores);
  virtual void forget() {}

  /// Only where SummaryKind::takes_projections; others refuse.
  virtual Status set_projection(int64_t layer, int64_t rank, const float* keys,
                                const float* queries);
  virtual void drop_projection(int64_t) {}
  /// What is kept beside a layer's rows, to be saved; set_projection() takes it again.
  virtual void list(int64_t, std::vector<SavedTensor>&) const {}
  /// Bytes of what is kept beside the rows, in the summaries' memory.
  virtual int64_t projection_bytes() const { return 0; }
};

/// One choice of SummaryEncoder: a line in rows_kind.cpp.
struct SummaryKind {
  const char* name;
  const char* source;  // the paper
  bool takes_projections;
  bool scores_by_mass;
  bool needs_all_heads;  // the query's heads must not be summed
  bool is_given;         // scores come from outside, before each choice
  bool is_of_clusters;   // what is chosen are clusters: a selector of their own has them
  /// Null: on a device a selector on the host has them; as for what has_device_kernels() is false.
  const struct DeviceEncoderKind* on_device;
  SummaryShape (*shape)(const MethodOptions& options, int64_t layer);
  std::unique_ptr<SummaryEncoder> (*make)(const MethodOptions& options,
                                          const std::shared_ptr<class SummaryMemory>& memory);

  static std::span<const SummaryKind> all();
  /// Null where there is none of that name.
  static const SummaryKind* find(const std::string& name);
  /// "low_rank, box"
  static std::string names();
};

/// Are rows made and scored on the device, where there is one? Not by the best head, in two stages,
/// with int4 rows, or where a row is wider than kSummaryRankMax.
bool has_device_kernels(const MethodOptions& options);

/// Is there such a kind, and does it know these settings? What it does not is refused by name.
Status check_method(const MethodOptions& options);

/// What projections are kept in: bf16 beside int4 rows, which are rounded by far more.
constexpr DType projection_dtype(DType summary_dtype) {
  return summary_dtype == DType::kInt4 ? DType::kBFloat16 : DType::kFloat32;
}

/// As a saved session calls a layer's projection of keys or queries.
std::string projection_name(int64_t layer, bool is_key);

/// Rows of a full chunk: whole blocks of 16 and whole groups, of at most 1024 tokens where a row is
/// one token.
int64_t chunk_rows(int64_t group_tokens, int64_t tokens_per_row);

}  // namespace kvswap
