#pragma once

#include <cstdint>
#include <memory>

#include "methods/group_rows.h"

namespace kvswap {

/// ShadowKV's landmarks (4.1): the mean of a group's keys, head_dim numbers a KV head and group.
/// A group is worth the product with its mean: half a box's memory, and no bound. A mean that is
/// not finite is NaN, as is then what the group is worth, and it is chosen before all others.
class MeanRows final : public GroupRows {
 public:
  explicit MeanRows(const MethodOptions& options) : GroupRows(options, GroupRow::kMean) {}
  static RowShape shape_of(const MethodOptions& options, int64_t) {
    return GroupRows::shape_of(options, GroupRow::kMean);
  }
  static std::unique_ptr<Rows> make(const MethodOptions& options,
                                    const std::shared_ptr<class SummaryMemory>&) {
    return std::make_unique<MeanRows>(options);
  }
};

}  // namespace kvswap
