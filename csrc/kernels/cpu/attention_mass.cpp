#include "kernels/attention_mass.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_mass.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/mass_rows-inl.h"
#include "kernels/cpu/mass_units.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

/// A run of pages of one table: of all KV heads of a sequence, or of the one that the table is of.
template <typename T>
class MassUnit {
 public:
  MassUnit(const AttentionMassArgs& args, const MassUnits& cut, int64_t unit)
      : out_(args),
        args_(args.attention),
        table_(unit / cut.parts),
        sequence_(table_ / args_.table_heads),
        first_kv_head_(table_ % args_.table_heads),
        heads_(args_.table_heads == 1 ? args_.kv_heads() : 1),
        first_page_(unit % cut.parts * cut.pages_each),
        last_page_(std::min(first_page_ + cut.pages_each, args_.pages_max)),
        rows_(heads_, args_.heads / args_.kv_heads() * args_.queries, args_.shape.head_dim,
              args_.scale, args_.softcap) {
    for (int64_t head = 0; head < heads_; ++head) load_queries(head);
  }

  void run() {
    for (int64_t head = 0; head < heads_; ++head) {
      clear(target(out_.mean, head));
      if (out_.square) clear(target(out_.square, head));
    }
    TokenWalk walk(args_, table_, first_page_, last_page_ - first_page_,
                   args_.query_positions[sequence_] + args_.queries - 1);
    TokenBlock blocks[2];
    walk.next(blocks[0]);
    for (int current = 0; blocks[current].count > 0; current = 1 - current) {
      walk.next(blocks[1 - current]);
      weigh(blocks[current], blocks[1 - current]);
    }
  }

 private:
  void load_queries(int64_t head) {
    for (int64_t row = 0; row < rows_.rows(); ++row) {
      const int64_t query = row % args_.queries;
      const int64_t query_head =
          (first_kv_head_ + head) * (args_.heads / args_.kv_heads()) + row / args_.queries;
      const T* source = static_cast<const T*>(args_.query) + sequence_ * args_.query_batch_stride +
                        query_head * args_.query_head_stride + query * args_.query_token_stride;
      rows_.set(head, row, source, args_.query_positions[sequence_] + query,
                args_.log_sum_exp[(sequence_ * args_.heads + query_head) * args_.queries + query]);
    }
  }

  void clear(float* of_head) const {
    const int64_t group_tokens = args_.shape.group_tokens;
    std::fill(of_head + first_page_ * group_tokens, of_head + last_page_ * group_tokens, 0.0f);
  }

  float* target(float* array, int64_t head) const {
    return array + (sequence_ * args_.kv_heads() + first_kv_head_ + head) * args_.pages_max *
                       args_.shape.group_tokens;
  }

  int64_t head_in_page(int64_t head) const {
    return args_.shape.kv_heads == 1 ? 0 : first_kv_head_ + head;
  }
  int64_t key_offset(const TokenBlock& block, int64_t head) const {
    const int64_t element_bytes = block.is_float8 ? 1 : static_cast<int64_t>(sizeof(T));
    return head_in_page(head) * args_.shape.head_elements() * element_bytes;
  }

  void weigh(TokenBlock& block, const TokenBlock& next) {
    rows_.look_at(block);
    for (int64_t head = 0; head < heads_; ++head) {
      const bool is_last = head + 1 == heads_;
      rows_.template weigh<T>(
          head,
          {.slots = block.slots,
           .next_slots = is_last ? next.slots : block.slots,
           .tokens = block.count,
           .next_tokens = is_last ? next.count : block.count,
           .key_offset = key_offset(block, head),
           .next_key_offset = is_last ? key_offset(next, 0) : key_offset(block, head + 1),
           .head_dim = args_.shape.head_dim},
          head_in_page(head));
      for (int64_t t = 0; t < block.count; ++t) {
        target(out_.mean, head)[block.places[t]] = rows_.mean(t);
        if (out_.square) target(out_.square, head)[block.places[t]] = rows_.square(t);
      }
    }
  }

  const AttentionMassArgs& out_;
  const PagedAttentionArgs& args_;
  int64_t table_;
  int64_t sequence_;
  int64_t first_kv_head_;
  int64_t heads_;
  int64_t first_page_;
  int64_t last_page_;
  MassRows rows_;
};

template <typename T>
void weigh_units(const AttentionMassArgs& args, int64_t begin, int64_t end) {
  const MassUnits cut(args.attention);
  for (int64_t unit = begin; unit < end; ++unit) MassUnit<T>(args, cut, unit).run();
}

void weigh_pages(const AttentionMassArgs& args, int64_t begin, int64_t end) {
  with_float_type(args.attention.dtype, [&]<typename T>() { weigh_units<T>(args, begin, end); });
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(weigh_pages);

void attention_mass(const AttentionMassArgs& args, const Execution& execution) {
  const MassUnits cut(args.attention);
  run_parallel(execution, cut.count, 1,
               [&](int64_t begin, int64_t end) { KVSWAP_DISPATCH(weigh_pages)(args, begin, end); });
}

}  // namespace kvswap
#endif  // HWY_ONCE
