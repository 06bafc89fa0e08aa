#pragma once

#include <cstdint>

namespace kvswap {

/// Whether a file system of this type, as statfs() numbers them, keeps its files in memory.
bool keeps_in_memory(uint32_t type);

/// Whether an open file is on such a one; false if the system does not say.
bool lies_in_memory(int fd);

}  // namespace kvswap
