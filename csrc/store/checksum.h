#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvswap {

/// XXH3 of some bytes, or what stands in for it where xxHash was not there to build with.
uint64_t checksum_of(std::span<const std::byte> bytes);

/// Whose a record is: its bytes sum up otherwise as any other's.
struct RecordOf {
  uint64_t seed = 0;  // of the session
  int64_t layer = 0;
  int64_t group = 0;
  uint32_t serial = 0;
};
/// bytes: payload and padding.
uint32_t record_checksum(std::span<const std::byte> bytes, const RecordOf& of);

/// "xxh3", or another name for what stands in: saved sums are compared by the same one alone.
const char* checksum_name();

}  // namespace kvswap
