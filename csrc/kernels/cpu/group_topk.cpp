#include "kernels/group_topk.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/group_topk.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/score_scan.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

/// The maxima of kLanes groups of kGroup consecutive scores.
template <int kGroup>
inline Floats group_maxima(const float* scores) {
  if constexpr (kGroup == 1) {
    return nan_to(load(scores), kAlways);
  } else {
    return pairwise_max(group_maxima<kGroup / 2>(scores),
                        group_maxima<kGroup / 2>(scores + kGroup / 2 * kLanes));
  }
}

/// Returns how many groups were done; the rest does not fill a vector.
template <int kGroup>
int64_t reduce_groups(const GroupMaxArgs& args) {
  const int64_t groups = args.tokens / (kGroup * kLanes) * kLanes;
  for (int64_t group = 0; group < groups; group += kLanes) {
    store(group_maxima<kGroup>(args.scores + group * kGroup), args.group_scores + group);
  }
  return groups;
}

int64_t reduce_whole_vectors(const GroupMaxArgs& args) {
  switch (args.group_tokens) {
    case 1:
      return reduce_groups<1>(args);
    case 2:
      return reduce_groups<2>(args);
    case 4:
      return reduce_groups<4>(args);
    case 8:
      return reduce_groups<8>(args);
    case 16:
      return reduce_groups<16>(args);
    case 32:
      return reduce_groups<32>(args);
    default:
      return 0;
  }
}

/// Collects scores above the threshold until there is no room for another vector of them.
void scan_scores(ScoreScan& scan) {
  const Floats threshold = fill(scan.threshold);
  while (scan.next < scan.count && scan.found + kLanes <= scan.capacity) {
    const int64_t left = scan.count - scan.next;
    const float* source = scan.scores + scan.next;
    const Floats scores = left >= kLanes ? load(source) : load_some(source, left);
    uint64_t hits = greater_bits(scores, threshold);
    if (left < kLanes) hits &= (uint64_t{1} << left) - 1;
    for (; hits; hits &= hits - 1) {
      const int64_t lane = std::countr_zero(hits);
      scan.candidates[scan.found++] = candidate_of(source[lane], scan.next + lane);
    }
    scan.next += kLanes;
  }
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(reduce_whole_vectors);
KVSWAP_EXPORT(scan_scores);

void group_max(const GroupMaxArgs& args) {
  int64_t group = KVSWAP_DISPATCH(reduce_whole_vectors)(args);
  for (; group * args.group_tokens < args.tokens; ++group) {
    const int64_t first = group * args.group_tokens;
    const int64_t last = std::min(first + args.group_tokens, args.tokens);
    float largest = kNever;
    for (int64_t token = first; token < last; ++token) {
      const float score = args.scores[token];
      largest = std::max(largest, std::isnan(score) ? kAlways : score);
    }
    args.group_scores[group] = largest;
  }
}

/// Keeps the k best candidates, in the order in which they stand.
static void keep_best(ScoreScan& scan, int64_t k, std::vector<uint64_t>& scratch) {
  scratch.assign(scan.candidates, scan.candidates + scan.found);
  std::nth_element(scratch.begin(), scratch.begin() + (k - 1), scratch.end(), std::greater<>());
  const uint64_t worst_kept = scratch[k - 1];
  uint64_t* end = std::remove_if(scan.candidates, scan.candidates + scan.found,
                                 [&](uint64_t candidate) { return candidate < worst_kept; });
  scan.found = end - scan.candidates;
  scan.threshold = score_of(worst_kept);
}

// One pass with a rising threshold: candidates are collected until the buffer is full, then all but
// the k best leave and the worst of those becomes the threshold. A later score equal to it has the
// higher index, so it loses the tie. Every weeding removes at least as many as it keeps: O(count).
int64_t top_k(const TopKArgs& args) {
  constexpr int64_t kSpareMin = 512;
  if (args.k <= 0) return 0;
  thread_local std::vector<uint64_t> candidates;
  thread_local std::vector<uint64_t> scratch;
  const int64_t k = std::min(args.k, args.count);
  const int64_t capacity = k + std::max(k, kSpareMin);
  if (static_cast<int64_t>(candidates.size()) < capacity) {
    candidates.resize(capacity);
    scratch.reserve(capacity);
  }
  ScoreScan scan{.scores = args.scores,
                 .count = args.count,
                 .candidates = candidates.data(),
                 .capacity = capacity};
  while (scan.next < scan.count) {
    KVSWAP_DISPATCH(scan_scores)(scan);
    if (scan.found > k) keep_best(scan, k, scratch);
  }
  std::transform(scan.candidates, scan.candidates + scan.found, args.indices, index_of);
  return scan.found;
}

}  // namespace kvswap
#endif  // HWY_ONCE
