#pragma once

#include <cstdint>
#include <memory>

#include "kernels/low_rank_score.h"
#include "methods/summary/group_encoder.h"

namespace kvswap {

/// A group is worth the product with its first key. Float32 summaries alone.
class FirstEncoder final : public GroupEncoder {
 public:
  explicit FirstEncoder(const MethodOptions& options) : GroupEncoder(options, GroupRow::kMean) {}
  static SummaryShape shape_of(const MethodOptions& options, int64_t) {
    return GroupEncoder::shape_of(options, GroupRow::kMean);
  }
  static std::unique_ptr<SummaryEncoder> make(const MethodOptions& options,
                                              const std::shared_ptr<class SummaryMemory>&) {
    return std::make_unique<FirstEncoder>(options);
  }

  void write(int64_t, const SummarySlice& piece) const override {
    const int64_t width = channels();
    auto* rows = reinterpret_cast<float*>(piece.rows);
    for (int64_t i = 0; i < piece.tokens / options().group_tokens; ++i) {
      const int64_t row = piece.first_row + i;
      float* lane = rows + row / kSummaryBlock * width * kSummaryBlock + row % kSummaryBlock;
      const int64_t first = i * options().group_tokens * piece.keys.token_stride;
      with_elements(piece.keys.data, piece.keys.dtype, [&](const auto* keys) {
        for (int64_t channel = 0; channel < width; ++channel) {
          const int64_t head = channel / options().head_dim;
          lane[channel * kSummaryBlock] =
              to_float(keys[first + head * piece.keys.head_stride + channel % options().head_dim]);
        }
      });
    }
  }
};

}  // namespace kvswap
