#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace kvswap {

inline constexpr float kNever = -std::numeric_limits<float>::infinity();
inline constexpr float kAlways = std::numeric_limits<float>::infinity();

/// A score and its index in one number: the greater is the better choice. All are different.
inline uint64_t candidate_of(float score, int64_t index) {
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);  // -0 and 0 are a tie
  const uint32_t ordered = bits & 0x80000000 ? ~bits : bits | 0x80000000;
  return uint64_t{ordered} << 32 | static_cast<uint32_t>(~index);
}

inline float score_of(uint64_t candidate) {
  const uint32_t ordered = static_cast<uint32_t>(candidate >> 32);
  return std::bit_cast<float>(ordered & 0x80000000 ? ordered & 0x7fffffff : ~ordered);
}

inline int32_t index_of(uint64_t candidate) {
  return static_cast<int32_t>(~static_cast<uint32_t>(candidate));
}

/// A pass over scores that collects those above a threshold.
struct ScoreScan {
  const float* scores = nullptr;  // [count]
  int64_t count = 0;
  int64_t next = 0;                // the first score not yet looked at
  float threshold = kNever;        // only greater scores are candidates
  uint64_t* candidates = nullptr;  // [capacity], in rising order of index
  int64_t found = 0;
  int64_t capacity = 0;
};

}  // namespace kvswap
