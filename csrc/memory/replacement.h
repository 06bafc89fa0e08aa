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

/// What is known beside it of a page of a cluster.
struct ClusterState {
  int32_t pages = 1;          // of the cluster; see PageMap::describe()
  uint64_t updated_step = 0;  // when what the page holds was last written anew; 0: never
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
/// Of clusters see cluster_rank().
inline uint64_t leaving_rank(Replacement replacement, const PageState& page) {
  if (!page.is_filled) return 0;
  switch (replacement) {
    case Replacement::kFifo:
      return 1 + page.loaded_step;
    case Replacement::kLru:
    case Replacement::kClusters:
      return 1 + page.used_step;
    case Replacement::kUnused:
    case Replacement::kNone:
      return 1;
    case Replacement::kScore:
      return 1 + uint64_t{std::bit_cast<uint32_t>(page.score)};  // as they are ordered
  }
  return 0;
}

/// The same of a page of a cluster; those updated in step `stays_from` or later leave last.
inline uint64_t cluster_rank(const PageState& page, const ClusterState& cluster,
                             uint64_t stays_from) {
  const uint64_t rank = leaving_rank(Replacement::kClusters, page);
  if (rank == 0) return 0;
  const bool stays = cluster.updated_step > 0 && cluster.updated_step >= stays_from;
  const auto smallness = static_cast<uint64_t>(UINT16_MAX - cluster.pages);
  return uint64_t{stays} << 63 | smallness << 46 | rank;
}

}  // namespace kvswap
