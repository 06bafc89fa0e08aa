#pragma once

// Stands in for libxxhash-dev's header where that is not installed: the two calls we make, under
// their names, by a simpler and slower hash (a 64 x 64 -> 128 bit product, folded, per word).
// A saved cache says by which its sums were made, so the two need not agree.

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvswap_fallback {

inline uint64_t fold(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace kvswap_fallback

inline uint64_t XXH3_64bits_withSeed(const void* data, size_t size, uint64_t seed) {
  constexpr uint64_t kFirst = 0x9e3779b97f4a7c15, kSecond = 0xd1b54a32d192ed03;
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint64_t hash = kvswap_fallback::fold(seed ^ kFirst, size ^ kSecond);
  for (; size > 0;) {
    uint64_t word = 0;
    const size_t part = size < sizeof(word) ? size : sizeof(word);
    std::memcpy(&word, bytes, part);
    // The sum keeps a word that is zero after the xor from wiping out what came before it.
    hash = kvswap_fallback::fold(hash ^ word ^ kFirst, kSecond) + hash;
    bytes += part;
    size -= part;
  }
  return kvswap_fallback::fold(hash ^ kSecond, kFirst);
}

inline uint64_t XXH3_64bits(const void* data, size_t size) {
  return XXH3_64bits_withSeed(data, size, 0);
}
