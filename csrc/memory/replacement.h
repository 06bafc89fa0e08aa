#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string>

namespace kvswap {

/// What is known about a page when somebody must leave.
struct PageState {
  uint64_t key = 0;
  uint64_t loaded_step = 0;
  uint64_t used_step = 0;
  bool is_filled = false;
  float score = 0;  // not negative; see PageMap::rate()
};

/// Who leaves first.
enum class Replacement {
  kFifo,    ///< the oldest load (KVSwap 3.4.3)
  kLru,     ///< the one not used for longest
  kUnused,  ///< any that the last step did not use, in page order (the published research code)
  kNone,    ///< everybody, before the next step: no reuse, to measure what reuse saves
  kScore,   ///< whose score is the lowest (ArkVale, DynaKV)
};

std::optional<Replacement> parse_replacement(const std::string& name);

/// Pages with the lowest rank leave first; ties in page order. Empty pages always come first.
inline uint64_t leaving_rank(Replacement replacement, const PageState& page) {
  if (!page.is_filled) return 0;
  switch (replacement) {
    case Replacement::kFifo:
      return 1 + page.loaded_step;
    case Replacement::kLru:
      return 1 + page.used_step;
    case Replacement::kUnused:
    case Replacement::kNone:
      return 1;
    case Replacement::kScore:
      return 1 + uint64_t{std::bit_cast<uint32_t>(page.score)};  // as they are ordered
  }
  return 0;
}

}  // namespace kvswap
