#include "kernels/paged_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/float8_exponent.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/paged_attention.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/paged_attention_tiles-inl.h"
#include "kernels/cpu/simd-inl.h"
#include "kernels/cpu/token_walk.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

/// One row of the result, from its unnormalised sum in fp32.
template <typename T>
void store_output(const PagedAttentionArgs& args, int64_t sequence, int64_t head, int64_t query,
                  const float* values, float factor) {
  const int64_t width = args.shape.value_width();
  T* output = static_cast<T*>(args.output) +
              ((sequence * args.queries + query) * args.heads + head) * width;
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) {
    store(multiply(load(values + d), fill(factor)), output + d);
  }
  for (; d < width; ++d) output[d] = from_float<T>(values[d] * factor);
}

void store_log_sum_exp(const PagedAttentionArgs& args, int64_t sequence, int64_t head,
                       int64_t query, float value) {
  if (!args.log_sum_exp) return;
  args.log_sum_exp[(sequence * args.heads + head) * args.queries + query] = value;
}

/// Consecutive units of one sequence and part that share a page table: their K and V are neighbours
/// in memory, so all of them attend to a block of tokens before the next block is looked at.
template <typename T>
class AttentionRun {
 public:
  AttentionRun(const PagedAttentionArgs& args, const AttentionPartition& cut, int64_t first_unit,
               int64_t units)
      : args_(args),
        cut_(cut),
        first_unit_(first_unit),
        units_(units),
        first_kv_head_(first_unit % cut.kv_heads),
        part_(first_unit / cut.kv_heads % cut.parts),
        sequence_(first_unit / cut.kv_heads / cut.parts) {}

  void attend() {
    make_state();
    for (int64_t unit = 0; unit < units_; ++unit) load_query(unit);
    if (args_.sinks && part_ == 0) begin_with_sinks();
    const int64_t table =
        sequence_ * args_.table_heads + (args_.table_heads == 1 ? 0 : first_kv_head_);
    TokenWalk walk(args_, table, part_ * cut_.pages_per_part, cut_.pages_per_part,
                   first_position() + args_.queries - 1);
    TokenBlock blocks[2];
    walk.next(blocks[0]);
    for (int current = 0; blocks[current].count > 0; current = 1 - current) {
      walk.next(blocks[1 - current]);
      attend_block(blocks[current], blocks[1 - current]);
    }
  }

  void finish(const AttentionPartials& partials) const {
    for (int64_t unit = 0; unit < units_; ++unit) {
      const AttentionState state = state_of(unit);
      for (int64_t row = 0; row < state.rows; ++row) finish_row(partials, state, unit, row);
    }
  }

 private:
  int64_t first_position() const { return args_.query_positions[sequence_]; }
  int64_t head_of(int64_t unit, int64_t row) const {
    return (first_kv_head_ + unit) * (args_.heads / cut_.kv_heads) + row / args_.queries;
  }
  static int64_t element_bytes(const TokenBlock& block) {
    return block.is_float8 ? 1 : static_cast<int64_t>(sizeof(T));
  }
  int64_t head_in_page(int64_t unit) const {
    return args_.shape.kv_heads == 1 ? 0 : first_kv_head_ + unit;
  }
  int64_t key_offset(const TokenBlock& block, int64_t unit) const {
    return head_in_page(unit) * args_.shape.head_elements() * element_bytes(block);
  }

  void make_state() {
    thread_local std::vector<float> scratch;
    const int64_t rows = units_ * cut_.rows;
    const int64_t stride = round_up_to_lanes(args_.shape.head_dim);
    const size_t size = rows * (2 * stride + kBlockTokens + 3);
    if (scratch.size() < size) scratch.resize(size);
    all_ = {.rows = cut_.rows, .stride = stride, .query = scratch.data()};
    all_.output = all_.query + rows * stride;
    all_.scores = all_.output + rows * stride;
    all_.largest = all_.scores + rows * kBlockTokens;
    all_.sum = all_.largest + rows;
    all_.decay = all_.sum + rows;
    std::fill_n(all_.query, 2 * rows * stride, 0.0f);
    std::fill_n(all_.largest, rows, kNothing);
    std::fill_n(all_.sum, rows, 0.0f);
  }

  AttentionState state_of(int64_t unit) const {
    const int64_t row = unit * cut_.rows;
    AttentionState state = all_;
    state.query += row * state.stride;
    state.output += row * state.stride;
    state.scores += row * kBlockTokens;
    state.largest += row;
    state.sum += row;
    state.decay += row;
    return state;
  }

  void load_query(int64_t unit) {
    const AttentionState state = state_of(unit);
    for (int64_t row = 0; row < state.rows; ++row) {
      const T* source = static_cast<const T*>(args_.query) + sequence_ * args_.query_batch_stride +
                        head_of(unit, row) * args_.query_head_stride +
                        row % args_.queries * args_.query_token_stride;
      float* target = state.query + row * state.stride;
      for (int64_t d = 0; d < args_.shape.head_dim; ++d) target[d] = to_float(source[d]);
    }
  }

  /// A sink is as a token seen first, whose value is zero. One part of a row has it.
  void begin_with_sinks() {
    for (int64_t unit = 0; unit < units_; ++unit) {
      const AttentionState state = state_of(unit);
      for (int64_t row = 0; row < state.rows; ++row) {
        state.largest[row] = args_.sinks[head_of(unit, row)];
        state.sum[row] = 1.0f;
      }
    }
  }

  void attend_block(TokenBlock& block, const TokenBlock& next) {
    pad_slots(block);
    for (int64_t unit = 0; unit < units_; ++unit) {
      const AttentionState state = state_of(unit);
      const bool is_last = unit + 1 == units_;
      const HeadBlock head{
          .slots = block.slots,
          .next_slots = is_last ? next.slots : block.slots,
          .value_slots = block.value_slots,
          .next_value_slots = is_last ? next.value_slots : block.value_slots,
          .tokens = block.count,
          .next_tokens = is_last ? next.count : block.count,
          .key_offset = key_offset(block, unit),
          .next_key_offset = is_last ? key_offset(next, 0) : key_offset(block, unit + 1),
          .side_bytes = args_.shape.value_elements() * element_bytes(block),
          .head_dim = args_.shape.head_dim,
          .value_dim = args_.shape.value_width()};
      score(state, head, block, unit);
      float scale = args_.scale;
      if (args_.softcap > 0.0f) {
        for (int64_t row = 0; row < state.rows; ++row) {
          cap_scores(state, row, scale, args_.softcap, block.count);
        }
        scale = 1.0f;
      }
      if (args_.queries > 1) hide_later_tokens(state, block);
      for (int64_t row = 0; row < state.rows; ++row) {
        weigh_scores(state, row, scale, block.count);
      }
      add_values(state, head, block, unit);
    }
  }

  /// A power of two is exact wherever it is multiplied in: here once a token.
  void score(const AttentionState& state, const HeadBlock& head, const TokenBlock& block,
             int64_t unit) const {
    if (!block.is_float8) return score_block<T>(state, head);
    score_block<Float8>(state, head);
    multiply_by_powers(state, block, 2 * head_in_page(unit));
  }
  void add_values(const AttentionState& state, const HeadBlock& head, const TokenBlock& block,
                  int64_t unit) const {
    if (!block.is_float8) return weigh_block<T>(state, head);
    multiply_by_powers(state, block, 2 * head_in_page(unit) + 1);
    weigh_block<Float8>(state, head);
  }

  /// Rows are (head of the group, query): hides what comes after the query's own position.
  void hide_later_tokens(const AttentionState& state, const TokenBlock& block) const {
    for (int64_t row = 0; row < state.rows; ++row) {
      float* scores = state.scores + row * kBlockTokens;
      const int64_t position = first_position() + row % args_.queries;
      for (int64_t t = 0; t < block.count; ++t) {
        if (block.positions[t] > position) scores[t] = kNothing;
      }
    }
  }

  void finish_row(const AttentionPartials& partials, const AttentionState& state, int64_t unit,
                  int64_t row) const {
    const bool is_empty = state.sum[row] == 0.0f;
    const float factor = is_empty ? 0.0f : 1.0f / state.sum[row];
    const float log_sum_exp = is_empty ? kNothing : state.largest[row] + std::log(state.sum[row]);
    const float* values = state.output + row * state.stride;
    if (cut_.parts == 1) {
      const int64_t query = row % args_.queries;
      store_output<T>(args_, sequence_, head_of(unit, row), query, values, factor);
      store_log_sum_exp(args_, sequence_, head_of(unit, row), query, log_sum_exp);
      return;
    }
    const int64_t place = (first_unit_ + unit) * cut_.rows + row;
    const int64_t width = args_.shape.value_width();
    float* target = partials.output + place * width;
    for (int64_t d = 0; d < width; ++d) target[d] = values[d] * factor;
    partials.log_sum_exp[place] = log_sum_exp;
  }

  const PagedAttentionArgs& args_;
  const AttentionPartition& cut_;
  int64_t first_unit_;
  int64_t units_;
  int64_t first_kv_head_;
  int64_t part_;
  int64_t sequence_;
  AttentionState all_;  // [units, rows] of everything
};

template <typename T>
void attend_typed(const PagedAttentionArgs& args, const AttentionPartials& partials, int64_t begin,
                  int64_t end) {
  const AttentionPartition cut(args);
  while (begin < end) {
    const int64_t neighbours = args.table_heads == 1 ? cut.kv_heads - begin % cut.kv_heads : 1;
    const int64_t units = std::min(neighbours, end - begin);
    AttentionRun<T> run(args, cut, begin, units);
    run.attend();
    run.finish(partials);
    begin += units;
  }
}

/// Joins the parts of one head's row, in rising order of pages. `first` is its place in part 0.
float join_parts(const AttentionPartition& cut, const AttentionPartials& partials, int64_t first,
                 int64_t width) {
  float* values = partials.output + first * width;
  float total = partials.log_sum_exp[first];
  for (int64_t part = 1; part < cut.parts; ++part) {
    const int64_t place = first + part * cut.kv_heads * cut.rows;
    const float theirs = partials.log_sum_exp[place];
    if (theirs == kNothing) continue;
    const float larger = std::max(total, theirs);
    const float both = larger + std::log(std::exp(total - larger) + std::exp(theirs - larger));
    const float weight = std::exp(total - both);
    const float other_weight = std::exp(theirs - both);
    for (int64_t d = 0; d < width; ++d) {
      values[d] = weight * values[d] + other_weight * partials.output[place * width + d];
    }
    total = both;
  }
  return total;
}

/// Heads are (sequence * kv_heads) + KV head.
template <typename T>
void merge_typed(const PagedAttentionArgs& args, const AttentionPartials& partials, int64_t begin,
                 int64_t end) {
  const AttentionPartition cut(args);
  const int64_t width = args.shape.value_width();
  for (int64_t i = begin * cut.rows; i < end * cut.rows; ++i) {
    const int64_t row = i % cut.rows;
    const int64_t kv_head = i / cut.rows % cut.kv_heads;
    const int64_t sequence = i / cut.rows / cut.kv_heads;
    const int64_t first = (sequence * cut.parts * cut.kv_heads + kv_head) * cut.rows + row;
    const float total = join_parts(cut, partials, first, width);
    const int64_t head = kv_head * (args.heads / cut.kv_heads) + row / args.queries;
    store_output<T>(args, sequence, head, row % args.queries, partials.output + first * width,
                    1.0f);
    store_log_sum_exp(args, sequence, head, row % args.queries, total);
  }
}

void attend_units(const PagedAttentionArgs& args, const AttentionPartials& partials, int64_t begin,
                  int64_t end) {
  with_float_type(args.dtype, [&]<typename T>() { attend_typed<T>(args, partials, begin, end); });
}

void merge_heads(const PagedAttentionArgs& args, const AttentionPartials& partials, int64_t begin,
                 int64_t end) {
  with_float_type(args.dtype, [&]<typename T>() { merge_typed<T>(args, partials, begin, end); });
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(attend_units);
KVSWAP_EXPORT(merge_heads);

void paged_attention(const PagedAttentionArgs& args, const Execution& execution) {
  const AttentionPartition cut(args);
  thread_local std::vector<float> workspace;
  AttentionPartials partials;
  if (cut.parts > 1) {
    const int64_t rows = cut.units * cut.rows;
    const int64_t width = args.shape.value_width();
    workspace.resize(std::max<size_t>(workspace.size(), rows * (width + 1)));
    partials = {.output = workspace.data(), .log_sum_exp = workspace.data() + rows * width};
  }
  run_parallel(execution, cut.units, 1, [&](int64_t begin, int64_t end) {
    KVSWAP_DISPATCH(attend_units)(args, partials, begin, end);
  });
  if (cut.parts == 1) return;
  run_parallel(execution, cut.units / cut.parts, 1, [&](int64_t begin, int64_t end) {
    KVSWAP_DISPATCH(merge_heads)(args, partials, begin, end);
  });
}

}  // namespace kvswap
#endif  // HWY_ONCE
