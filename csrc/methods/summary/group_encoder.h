#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cpu/element.h"
#include "kernels/group_rows.h"
#include "methods/summary/summary_encoder.h"

namespace kvswap {

/// Which tokens of each of the piece's groups count: [groups]. Empty: all.
std::vector<uint64_t> masks_of(const SummarySlice& piece, int64_t group_tokens);

/// Rows of one group each: of every channel one number or two, [kv_heads * head_dim] of the first,
/// then of the second. A query meets the first as it is and the second as bound_weight |q|.
///
/// What they need neither projection nor calibration for; padding is left out of them. Not for
/// small groups: a row is as large as the keys of one token or two.
class GroupEncoder : public SummaryEncoder {
 public:
  SummaryShape shape(int64_t) const override { return shape_of(options_, row_); }
  void write(int64_t layer, const SummarySlice& piece) const override;
  void ask(int64_t layer, const QueryView& query, int64_t batch, float* asked) const override;
  void ask_each_head(int64_t layer, const QueryView& query, int64_t batch, float scale,
                     float* asked) const override;

 protected:
  GroupEncoder(const MethodOptions& options, GroupRow row) : options_(options), row_(row) {}
  static SummaryShape shape_of(const MethodOptions& options, GroupRow row) {
    return {.width = numbers_of(row) * options.kv_heads * options.head_dim,
            .tokens_per_row = options.group_tokens};
  }
  const MethodOptions& options() const { return options_; }
  int64_t channels() const { return options_.kv_heads * options_.head_dim; }

 private:
  AskGroupsArgs asking(const QueryView& query, int64_t row) const;

  MethodOptions options_;
  GroupRow row_;
};

}  // namespace kvswap
