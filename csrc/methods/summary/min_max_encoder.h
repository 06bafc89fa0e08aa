#pragma once

#include <cstdint>
#include <memory>

#include "methods/summary/group_encoder.h"

namespace kvswap {

/// Quest's rows (3.2): the box around a group's keys, of each channel the least and the largest
/// value, here as middle and half width (GroupRow::kBox): 2 * kv_heads * head_dim numbers a group.
/// Asked with [sum of the heads' q, bound_weight times the sum of their |q|], the inner product is,
/// with a weight of 1, the sum over heads of the largest product that a key in the box can have;
/// with less it is no bound.
///
/// Half widths are rounded up, so that with a weight of 1 the score is a bound at any precision of
/// the summary. A group with a key that is no finite number has the largest box, so that it is
/// chosen before all others and what it makes of the attention is seen. Padding is left out. Needs
/// no projection and no calibration. Not for small groups: a row is as large as the keys of two
/// tokens.
class MinMaxEncoder final : public GroupEncoder {
 public:
  explicit MinMaxEncoder(const MethodOptions& options) : GroupEncoder(options, GroupRow::kBox) {}
  static SummaryShape shape_of(const MethodOptions& options, int64_t) {
    return GroupEncoder::shape_of(options, GroupRow::kBox);
  }
  static std::unique_ptr<SummaryEncoder> make(const MethodOptions& options,
                                              const std::shared_ptr<class SummaryMemory>&) {
    return std::make_unique<MinMaxEncoder>(options);
  }
};

}  // namespace kvswap
