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
  float score = 0;            // not negative; see PageMap::rate()
  int32_t unit_pages = 1;     // of the cluster that it is a page of; see PageMap::describe()
  uint64_t updated_step = 0;  // when what it holds was last written anew; 0: never
};

/// Who leaves first.
enum class Replacement {
  kFifo,      ///< the oldest load (KVSwap 3.4.3)
  kLru,       ///< the one not used for longest
  kUnused,    ///< any that the last step did not use, in page order (the published research code)
  kNone,      ///< everybody, before the next step: no reuse, to measure what reuse saves
  kScore,     ///< whose score is the lowest (ArkVale)
  kClusters,  ///< of the largest cluster, the one not used for longest; last of all who was updated
              ///< (DynaKV 6.2)
};

std::optional<Replacement> parse_replacement(const std::string& name);

/// Pages with the lowest rank leave first; ties in page order. Empty pages always come first.
/// stays_from: pages that were updated in this step or later leave last.
inline uint64_t leaving_rank(Replacement replacement, const PageState& page,
                             uint64_t stays_from = ~uint64_t{0}) {
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
    case Replacement::kClusters: {
      const bool stays = page.updated_step > 0 && page.updated_step >= stays_from;
      const auto smallness = static_cast<uint64_t>(UINT16_MAX - page.unit_pages);
      return uint64_t{stays} << 63 | smallness << 46 | (1 + page.used_step);
    }
  }
  return 0;
}

}  // namespace kvswap
