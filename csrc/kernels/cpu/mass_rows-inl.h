// The weights that queries give to a block of tokens, summed over the queries of one KV head.
// Included once for each instruction set (see targets.h), hence the guard that toggles.
#if defined(KVSWAP_MASS_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSWAP_MASS_ROWS_INL_H_
#undef KVSWAP_MASS_ROWS_INL_H_
#else
#define KVSWAP_MASS_ROWS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/paged_attention_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

/// fp32 copies of the queries that are summed over, with what each of them sees.
class MassRows {
 public:
  /// Scratch of the calling thread's, until its next MassRows.
  MassRows(int64_t rows, int64_t head_dim, float scale, float softcap)
      : head_dim_(head_dim),
        scale_(scale),
        softcap_(softcap),
        capped_scale_(softcap > 0.0f ? 1.0f : scale),
        stride_(round_up_to_lanes(head_dim)) {
    thread_local std::vector<float> scratch;
    const size_t size = rows * (stride_ + kBlockTokens + 4) + 2 * kBlockTokens;
    if (scratch.size() < size) scratch.resize(size);
    std::fill_n(scratch.begin(), rows * stride_, 0.0f);
    state_ = {.rows = rows, .stride = stride_, .query = scratch.data()};
    state_.scores = state_.query + rows * stride_;
    state_.largest = state_.scores + rows * kBlockTokens;
    state_.sum = state_.largest + rows;
    state_.decay = state_.sum + rows;
    log_sum_exp_ = state_.decay + rows;
    sums_ = log_sum_exp_ + rows;
    squares_ = sums_ + kBlockTokens;
    std::fill_n(state_.largest, rows, kNothing);
    std::fill_n(state_.sum, rows, 0.0f);
    last_columns_.resize(rows);
  }

  int64_t rows() const { return state_.rows; }

  /// Row `row` sees columns up to `last_column`.
  template <typename T>
  void set(int64_t row, const T* query, int64_t last_column, float log_sum_exp) {
    float* target = state_.query + row * stride_;
    for (int64_t d = 0; d < head_dim_; ++d) target[d] = to_float(query[d]);
    last_columns_[row] = last_column;
    log_sum_exp_[row] = log_sum_exp;
  }

  /// Adds a block to each row's sum of exponentials.
  template <typename T>
  void add_to_sums(TokenBlock& block) {
    score<T>(block);
    for (int64_t row = 0; row < state_.rows; ++row) {
      weigh_scores(state_, row, capped_scale_, block.count);
    }
  }
  /// Of all blocks that were added.
  float log_sum_exp(int64_t row) const {
    return state_.sum[row] > 0.0f ? state_.largest[row] + std::log(state_.sum[row]) : kNothing;
  }

  /// The mean weight of each of the block's tokens, and of its square.
  template <typename T>
  void weigh(TokenBlock& block) {
    score<T>(block);
    const int64_t padded = round_up_to_lanes(block.count);
    std::fill_n(sums_, 2 * kBlockTokens, 0.0f);
    for (int64_t row = 0; row < state_.rows; ++row) {
      if (log_sum_exp_[row] == kNothing) continue;
      float* scores = state_.scores + row * kBlockTokens;
      std::fill(scores + block.count, scores + padded, kNothing);
      for (int64_t t = 0; t < padded; t += kLanes) {
        const Floats weight = exponential(
            multiply_add(load(scores + t), fill(capped_scale_), fill(-log_sum_exp_[row])));
        store(add(load(sums_ + t), weight), sums_ + t);
        store(multiply_add(weight, weight, load(squares_ + t)), squares_ + t);
      }
    }
  }
  float mean(int64_t token) const { return sums_[token] / static_cast<float>(state_.rows); }
  float square(int64_t token) const { return squares_[token] / static_cast<float>(state_.rows); }

 private:
  /// Scores of a block whose slots are the keys themselves, capped but where there is no cap not
  /// scaled; what a row does not see is -inf.
  template <typename T>
  void score(TokenBlock& block) {
    const int64_t whole = (block.count + kTileTokens - 1) / kTileTokens * kTileTokens;
    std::fill(block.slots + block.count, block.slots + whole, block.slots[block.count - 1]);
    score_block<T>(state_, {.slots = block.slots, .tokens = block.count, .head_dim = head_dim_});
    for (int64_t row = 0; softcap_ > 0.0f && row < state_.rows; ++row) {
      cap_scores(state_, row, scale_, softcap_, block.count);
    }
    const int32_t last = *std::max_element(block.columns, block.columns + block.count);
    for (int64_t row = 0; row < state_.rows; ++row) {
      if (last <= last_columns_[row]) continue;
      float* scores = state_.scores + row * kBlockTokens;
      for (int64_t t = 0; t < block.count; ++t) {
        if (block.columns[t] > last_columns_[row]) scores[t] = kNothing;
      }
    }
  }

  int64_t head_dim_;
  float scale_;
  float softcap_;       // 0: none
  float capped_scale_;  // of scores that are capped where they are to be
  int64_t stride_;
  AttentionState state_;
  float* log_sum_exp_;  // [rows]
  float* sums_;         // [kBlockTokens], and the squares after them
  float* squares_;
  std::vector<int64_t> last_columns_;  // [rows]
};

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVSWAP_MASS_ROWS_INL_H_
