#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvswap {

/// Queries that stand in a row, of one sequence and layer, and how they attended: of the end of a
/// long chunk, or the newest that were decoded.
struct ObservationWindow {
  std::vector<std::byte> queries;  // [heads, slots, head_dim] of the model's dtype
  /// [heads, count]: of all that each attended; empty: not known.
  std::vector<float> log_sum_exp;
  int64_t count = 0;              // 0: there is none
  int64_t first_position = 0;     // where the first of them stands
  float scale = 1.0f;             // of attention
  float softcap = 0.0f;           // as PagedAttentionArgs
  int64_t slots = 0;              // 0: as many as there are queries
  int64_t begin = 0;              // slot of the first; the others follow, in a ring
  std::vector<float> sinks = {};  // [heads], as PagedAttentionArgs; empty: there are none

  int64_t slot(int64_t query) const { return slots == 0 ? query : (begin + query) % slots; }
  /// How many of the next queries stand one behind the other, from `query` on.
  int64_t in_a_row(int64_t query) const;

  /// Queries of one step; strides and sizes are bytes.
  struct Decoded {
    const std::byte* queries = nullptr;
    int64_t head_stride = 0;
    int64_t query_stride = 0;
    int64_t row_bytes = 0;  // of one head's query
    int64_t heads = 0;
    int64_t count = 0;
    int64_t first_position = 0;
  };
  /// They become its newest, of `most` at most; what attended later, or not just before, is
  /// forgotten. What it attended is not known afterwards.
  void add(const Decoded& decoded, int64_t most);
  /// Forgets queries from that position on.
  void truncate(int64_t positions);

 private:
  void make_ring(const Decoded& decoded, int64_t most);
};

}  // namespace kvswap
