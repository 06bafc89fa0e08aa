#pragma once

#include "methods/retention/retention_policy.h"

namespace kvswap {

/// H2O 4: tokens with the most attention since the prompt, summed over all steps.
class H2o final : public RetentionPolicy {
 public:
  static constexpr RetentionKind kKind = {
      .name = "heavy", .source = "H2O 4", .accumulates = true, .make = &make_retention<H2o>};

  explicit H2o(const RetentionOptions&) {}
};

}  // namespace kvswap
