#pragma once

#include <cstdint>

namespace kvswap {

/// Writes zeros over the first `bytes` of a file, in their place, and waits until the disk has
/// them. Returns 0, or errno of what kept it from that. `bytes` is a multiple of what O_DIRECT
/// asks.
int overwrite_with_zeros(int fd, int64_t bytes);

}  // namespace kvswap
