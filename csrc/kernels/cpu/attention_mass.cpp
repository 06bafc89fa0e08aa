#include "kernels/attention_mass.h"

#include <algorithm>
#include <bit>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_mass.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/mass_rows-inl.h"
#include "kernels/cpu/mass_units.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

/// The pages of one unit.
template <typename T>
class MassUnit {
 public:
  MassUnit(const AttentionMassArgs& args, const MassUnits& cut, int64_t unit)
      : out_(args),
        args_(args.attention),
        sequence_(unit / cut.parts / args_.kv_heads()),
        kv_head_(unit / cut.parts % args_.kv_heads()),
        first_page_(unit % cut.parts * cut.pages_each),
        last_page_(std::min(first_page_ + cut.pages_each, args_.pages_max)),
        rows_(args_.heads / args_.kv_heads() * args_.queries, args_.shape.head_dim, args_.scale,
              args_.softcap) {
    for (int64_t row = 0; row < rows_.rows(); ++row) {
      const int64_t query = row % args_.queries;
      const int64_t head = kv_head_ * (args_.heads / args_.kv_heads()) + row / args_.queries;
      const T* source = static_cast<const T*>(args_.query) + sequence_ * args_.query_batch_stride +
                        head * args_.query_head_stride + query * args_.query_token_stride;
      rows_.set(row, source, args_.query_columns[sequence_] + query,
                args_.log_sum_exp[(sequence_ * args_.heads + head) * args_.queries + query]);
    }
  }

  void run() {
    const int64_t group_tokens = args_.shape.group_tokens;
    const int64_t first = first_page_ * group_tokens;
    const int64_t count = (last_page_ - first_page_) * group_tokens;
    std::fill_n(target(out_.mean) + first, count, 0.0f);
    if (out_.square) std::fill_n(target(out_.square) + first, count, 0.0f);
    const int64_t table = sequence_ * args_.table_heads + (args_.table_heads == 1 ? 0 : kv_head_);
    const int64_t end = std::min<int64_t>(last_page_, args_.page_counts[table]);
    for (int64_t page = first_page_; page < end; ++page) add_page(table, page);
    finish_block();
  }

 private:
  float* target(float* array) const {
    return array +
           (sequence_ * args_.kv_heads() + kv_head_) * args_.pages_max * args_.shape.group_tokens;
  }

  void add_page(int64_t table, int64_t page) {
    const int64_t row_bytes = args_.shape.head_dim * static_cast<int64_t>(sizeof(T));
    const int64_t head_bytes =
        args_.shape.kv_heads == 1 ? 0 : 2 * kv_head_ * args_.shape.group_tokens * row_bytes;
    const int64_t entry = table * args_.pages_max + page;
    const uint64_t in_page = ~uint64_t{0} >> (64 - args_.shape.group_tokens);
    for (uint64_t mask = args_.masks[entry] & in_page; mask != 0; mask &= mask - 1) {
      const int64_t token = std::countr_zero(mask);
      block_.slots[block_.count] =
          static_cast<const char*>(args_.pages[entry]) + head_bytes + token * row_bytes;
      block_.columns[block_.count] = args_.columns[entry] + static_cast<int32_t>(token);
      slots_[block_.count++] = page * args_.shape.group_tokens + token;
      if (block_.count == kBlockTokens) finish_block();
    }
  }

  void finish_block() {
    if (block_.count == 0) return;
    rows_.template weigh<T>(block_);
    for (int64_t t = 0; t < block_.count; ++t) {
      target(out_.mean)[slots_[t]] = rows_.mean(t);
      if (out_.square) target(out_.square)[slots_[t]] = rows_.square(t);
    }
    block_.count = 0;
  }

  const AttentionMassArgs& out_;
  const PagedAttentionArgs& args_;
  int64_t sequence_;
  int64_t kv_head_;
  int64_t first_page_;
  int64_t last_page_;
  MassRows rows_;
  TokenBlock block_;
  int64_t slots_[kBlockTokens] = {};
};

template <typename T>
void weigh_units(const AttentionMassArgs& args, int64_t begin, int64_t end) {
  const PagedAttentionArgs& table = args.attention;
  const MassUnits cut(table.batch * table.kv_heads(), table.pages_max, table.shape.group_tokens);
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
  const PagedAttentionArgs& table = args.attention;
  const MassUnits cut(table.batch * table.kv_heads(), table.pages_max, table.shape.group_tokens);
  run_parallel(execution, cut.count, 1,
               [&](int64_t begin, int64_t end) { KVSWAP_DISPATCH(weigh_pages)(args, begin, end); });
}

}  // namespace kvswap
#endif  // HWY_ONCE
