#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "methods/group_rows.h"

namespace kvswap {

/// A group is worth the product with its first key. Float32 summaries alone.
class FirstRows final : public GroupRows {
 public:
  explicit FirstRows(const MethodOptions& options) : GroupRows(options, 1) {}
  static RowShape shape_of(const MethodOptions& options, int64_t) {
    return GroupRows::shape_of(options, 1);
  }
  static std::unique_ptr<Rows> make(const MethodOptions& options,
                                    const std::shared_ptr<class SummaryMemory>&) {
    return std::make_unique<FirstRows>(options);
  }

  void write(int64_t, const RowPiece& piece) const override {
    const int64_t width = channels();
    auto* rows = reinterpret_cast<float*>(piece.rows);
    for (int64_t i = 0; i < piece.tokens / options().group_tokens; ++i) {
      const int64_t row = piece.first_row + i;
      float* lane = rows + row / kSummaryBlock * width * kSummaryBlock + row % kSummaryBlock;
      std::vector<bool> is_known(width, false);
      for_each_key(piece, i * options().group_tokens, [&](int64_t channel, float key) {
        if (!is_known[channel]) lane[channel * kSummaryBlock] = key;
        is_known[channel] = true;
      });
    }
  }
};

}  // namespace kvswap
