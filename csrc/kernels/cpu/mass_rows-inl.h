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

/// fp32 copies of the queries that are summed over, those of a KV head in its rows, with what each
/// of them sees.
class MassRows {
 public:
  /// `rows` of each head. Scratch of the calling thread's, until its next MassRows.
  MassRows(int64_t heads, int64_t rows, int64_t head_dim, float scale, float softcap)
      : head_dim_(head_dim),
        scale_(scale),
        softcap_(softcap),
        capped_scale_(softcap > 0.0f ? 1.0f : scale),
        share_(1.0f / static_cast<float>(rows)) {
    thread_local std::vector<float> scratch;
    const int64_t stride = round_up_to_lanes(head_dim);
    const int64_t all = heads * rows;
    const size_t size = all * (stride + kBlockTokens + 4) + 2 * kBlockTokens;
    if (scratch.size() < size) scratch.resize(size);
    std::fill_n(scratch.begin(), all * stride, 0.0f);
    all_ = {.rows = rows, .stride = stride, .query = scratch.data()};
    all_.scores = all_.query + all * stride;
    all_.largest = all_.scores + all * kBlockTokens;
    all_.sum = all_.largest + all;
    all_.decay = all_.sum + all;
    log_sum_exp_ = all_.decay + all;
    sums_ = log_sum_exp_ + all;
    squares_ = sums_ + kBlockTokens;
    std::fill_n(all_.largest, all, kNothing);
    std::fill_n(all_.sum, all, 0.0f);
    last_positions_.resize(all);
  }

  int64_t rows() const { return all_.rows; }

  /// A head's row `row` sees positions up to `last_position`.
  template <typename T>
  void set(int64_t head, int64_t row, const T* query, int64_t last_position, float log_sum_exp) {
    const int64_t at = head * all_.rows + row;
    float* target = all_.query + at * all_.stride;
    int64_t d = 0;
    for (; d + kLanes <= head_dim_; d += kLanes) store(load(query + d), target + d);
    for (; d < head_dim_; ++d) target[d] = to_float(query[d]);
    last_positions_[at] = last_position;
    log_sum_exp_[at] = log_sum_exp;
  }

  /// The block that the next calls are about; not empty.
  void look_at(TokenBlock& block) {
    pad_slots(block);
    block_ = &block;
    last_ = *std::max_element(block.positions, block.positions + block.count);
  }

  /// Adds the block to the sum of exponentials of each row of a head. `keys` is the block again, as
  /// the head sees it.
  template <typename T>
  void add_to_sums(int64_t head, const HeadBlock& keys) {
    const AttentionState state = score<T>(head, keys, 0);
    for (int64_t row = 0; row < state.rows; ++row) {
      weigh_scores(state, row, capped_scale_, block_->count);
    }
  }
  /// Of all blocks that were added.
  float log_sum_exp(int64_t head, int64_t row) const {
    const int64_t at = head * all_.rows + row;
    return all_.sum[at] == 0.0f ? kNothing : all_.largest[at] + std::log(all_.sum[at]);
  }

  /// The mean weight that a head's rows give to each of the block's tokens, and of its square.
  /// `head_in_page`: whose exponents an e4m3 page's keys have.
  template <typename T>
  void weigh(int64_t head, const HeadBlock& keys, int64_t head_in_page) {
    const AttentionState state = score<T>(head, keys, head_in_page);
    const float* log_sum_exp = log_sum_exp_ + head * state.rows;
    const int64_t padded = round_up_to_lanes(block_->count);
    for (int64_t row = 0; row < state.rows; ++row) {
      float* scores = state.scores + row * kBlockTokens;
      std::fill(scores + block_->count, scores + padded, kNothing);
    }
    for (int64_t t = 0; t < padded; t += kLanes) {
      Floats sum = zeros(), square = zeros();
      for (int64_t row = 0; row < state.rows; ++row) {
        if (log_sum_exp[row] == kNothing) continue;
        const Floats below = multiply_add(load(state.scores + row * kBlockTokens + t),
                                          fill(capped_scale_), fill(-log_sum_exp[row]));
        const Floats weight = keep_nan(below, exponential(below));
        sum = add(sum, weight);
        square = multiply_add(weight, weight, square);
      }
      store(multiply(sum, fill(share_)), sums_ + t);
      store(multiply(square, fill(share_)), squares_ + t);
    }
  }
  float mean(int64_t token) const { return sums_[token]; }
  float square(int64_t token) const { return squares_[token]; }

 private:
  AttentionState state_of(int64_t head) const {
    const int64_t row = head * all_.rows;
    AttentionState state = all_;
    state.query += row * state.stride;
    state.scores += row * kBlockTokens;
    state.largest += row;
    state.sum += row;
    state.decay += row;
    return state;
  }

  /// A head's scores of the block, capped but where there is no cap not scaled; what a row does not
  /// see is -inf.
  template <typename T>
  AttentionState score(int64_t head, const HeadBlock& keys, int64_t head_in_page) {
    const AttentionState state = state_of(head);
    if (block_->is_float8) {
      score_block<Float8>(state, keys);
      multiply_by_powers(state, *block_, 2 * head_in_page);
    } else {
      score_block<T>(state, keys);
    }
    for (int64_t row = 0; softcap_ > 0.0f && row < state.rows; ++row) {
      cap_scores(state, row, scale_, softcap_, block_->count);
    }
    for (int64_t row = 0; row < state.rows; ++row) {
      const int64_t last_position = last_positions_[head * state.rows + row];
      if (last_ <= last_position) continue;
      float* scores = state.scores + row * kBlockTokens;
      for (int64_t t = 0; t < block_->count; ++t) {
        if (block_->positions[t] > last_position) scores[t] = kNothing;
      }
    }
    return state;
  }

  int64_t head_dim_;
  float scale_;
  float softcap_;       // 0: none
  float capped_scale_;  // of scores that are capped where they are to be
  float share_;         // of a row in a mean
  AttentionState all_;  // [heads, rows] of everything; rows: of each
  float* log_sum_exp_;  // [heads, rows]
  float* sums_;         // [kBlockTokens], and the squares after them
  float* squares_;
  std::vector<int64_t> last_positions_;  // [heads, rows]
  const TokenBlock* block_ = nullptr;
  int64_t last_ = 0;  // of its positions
};

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVSWAP_MASS_ROWS_INL_H_
