#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvswap {

/// XXH3 of some bytes, or what stands in for it where xxHash was not there to build with.
uint64_t checksum_of(std::span<const std::byte> bytes);

/// "xxh3", or another name for what stands in: saved sums are compared by the same one alone.
const char* checksum_name();

}  // namespace kvswap
