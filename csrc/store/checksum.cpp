#include "store/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvswap {

uint64_t checksum_of(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

const char* checksum_name() {
#ifdef XXH_VERSION_NUMBER
  return "xxh3";
#else
  return "kvswap-fold";
#endif
}

}  // namespace kvswap
