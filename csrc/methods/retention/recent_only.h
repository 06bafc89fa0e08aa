#pragma once

#include "methods/retention/retention_policy.h"

namespace kvswap {

/// Every token is selected, or attended: nothing is retained.
inline constexpr RetentionKind kNoRetention = {.name = "none", .source = "", .keeps_tokens = false};

/// StreamingLLM 3.2: sinks and recent tokens alone.
inline constexpr RetentionKind kRecentOnly = {
    .name = "newest", .source = "StreamingLLM 3.2", .keeps_tokens = false};

}  // namespace kvswap
