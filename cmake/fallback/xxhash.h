#pragma once

// Stands in for libxxhash-dev's header where that is not installed: the calls we make, by a simpler
// and slower hash (a 64 x 64 -> 128 bit product, folded, per word).
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

/// The same of bytes that come in pieces; how many come in all is known from the start.
struct Running {
  static constexpr uint64_t kFirst = 0x9e3779b97f4a7c15, kSecond = 0xd1b54a32d192ed03;
  uint64_t hash = 0;
  unsigned char word[8];
  size_t held = 0;

  void begin(uint64_t size, uint64_t seed) { hash = fold(seed ^ kFirst, size ^ kSecond); }
  void add(const unsigned char* bytes, size_t size) {
    while (size > 0) {
      const size_t part = size < sizeof(word) - held ? size : sizeof(word) - held;
      std::memcpy(word + held, bytes, part);
      held += part;
      bytes += part;
      size -= part;
      if (held == sizeof(word)) take();
    }
  }
  uint64_t value() const {
    Running last = *this;
    if (last.held > 0) last.take();
    return fold(last.hash ^ kSecond, kFirst);
  }

 private:
  void take() {
    uint64_t number = 0;
    std::memcpy(&number, word, held);
    held = 0;
    // The sum keeps a word that is zero after the xor from wiping out what came before it.
    hash = fold(hash ^ number ^ kFirst, kSecond) + hash;
  }
};

}  // namespace kvswap_fallback

inline uint64_t XXH3_64bits_withSeed(const void* data, size_t size, uint64_t seed) {
  kvswap_fallback::Running running;
  running.begin(size, seed);
  running.add(static_cast<const unsigned char*>(data), size);
  return running.value();
}

inline uint64_t XXH3_64bits(const void* data, size_t size) {
  return XXH3_64bits_withSeed(data, size, 0);
}
