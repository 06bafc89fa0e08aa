#pragma once

#include <cstdint>
#include <memory>

#include "methods/summary/group_encoder.h"

namespace kvswap {

/// ShadowKV's landmarks (4.1): the mean of a group's keys, head_dim numbers a KV head and group.
/// A group is worth the product with its mean: half a box's memory, and no bound. A mean that is
/// not finite is NaN, as is then what the group is worth, and it is chosen before all others.
class MeanEncoder final : public GroupEncoder {
 public:
  explicit MeanEncoder(const MethodOptions& options) : GroupEncoder(options, GroupRow::kMean) {}
  static SummaryShape shape_of(const MethodOptions& options, int64_t) {
    return GroupEncoder::shape_of(options, GroupRow::kMean);
  }
  static std::unique_ptr<SummaryEncoder> make(const MethodOptions& options,
                                              const std::shared_ptr<class SummaryMemory>&) {
    return std::make_unique<MeanEncoder>(options);
  }
};

}  // namespace kvswap
