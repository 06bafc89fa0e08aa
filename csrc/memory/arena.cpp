#include "memory/arena.h"

#include <numeric>

namespace kvswap {

const char* use_name(Use use) {
  switch (use) {
    case Use::kPages:
      return "pages";
    case Use::kRetained:
      return "kept";
    case Use::kSummary:
      return "summary";
    case Use::kTables:
      return "tables";
    case Use::kStaging:
      return "staging";
    case Use::kProjections:
      return "projections";
    case Use::kScratch:
      return "scratch";
    case Use::kDevice:
      return "device";
    case Use::kPinned:
      return "pinned";
    case Use::kTimeline:
      return "timeline";
  }
  return "?";
}

int64_t Arena::total() const { return std::accumulate(taken_.begin(), taken_.end(), int64_t{0}); }

Arena Arena::only(std::initializer_list<Use> uses) const {
  Arena some;
  for (const Use use : uses) some.take(use, of(use));
  return some;
}

}  // namespace kvswap
