#include "store/checksum.h"

#include <array>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvswap {

uint64_t checksum_of(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

uint32_t record_checksum(std::span<const std::byte> bytes, const RecordOf& of) {
  const std::array<uint64_t, 4> identity = {of.seed, static_cast<uint64_t>(of.layer),
                                            static_cast<uint64_t>(of.group), of.serial};
  const uint64_t mixed = XXH3_64bits(identity.data(), sizeof(identity));
  return static_cast<uint32_t>(XXH3_64bits_withSeed(bytes.data(), bytes.size(), mixed));
}

const char* checksum_name() {
#ifdef XXH_VERSION_NUMBER
  return "xxh3";
#else
  return "kvswap-fold";
#endif
}

}  // namespace kvswap
