#include "kernels/group_mass.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/group_mass.cpp"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/score_scan.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvswap::HWY_NAMESPACE {

inline constexpr float kLargestFinite = std::numeric_limits<float>::max();
inline constexpr float kSmallest = std::numeric_limits<float>::min();
inline constexpr float kFarBelow = -87.0f;  // exp() of it is the smallest normal number, about

/// NaN does not count; infinity is the largest number there is.
inline Floats cleaned(Floats logits) {
  const Floats numbers = nan_to(logits, kNever);
  return where_greater(numbers, fill(kLargestFinite), fill(kLargestFinite), numbers);
}

/// The logits of one head, in whole vectors: what is missing of the last one does not count.
Floats logits_at(const float* logits, int64_t token, int64_t tokens) {
  if (token + kLanes <= tokens) return cleaned(load(logits + token));
  float lanes[kLanes];
  std::fill_n(lanes, kLanes, kNever);
  std::copy(logits + token, logits + tokens, lanes);
  return cleaned(load(lanes));
}

float largest_logit(const float* logits, int64_t tokens) {
  Floats lanes = fill(kNever);
  for (int64_t t = 0; t < tokens; t += kLanes) lanes = maximum(lanes, logits_at(logits, t, tokens));
  return largest(lanes);
}

/// weights[t] = exp(logit - reference) where the token counts, else 0; whole vectors are written.
void weigh_tokens(const float* logits, int64_t tokens, float reference, float* weights) {
  for (int64_t t = 0; t < tokens; t += kLanes) {
    const Floats own = logits_at(logits, t, tokens);
    const Floats below = maximum(add(own, fill(-reference)), fill(kFarBelow));
    store(where_greater(own, fill(kNever), exponential(below), zeros()), weights + t);
  }
}

/// The sums of kLanes groups of kGroup consecutive weights.
template <int kGroup>
inline Floats group_sums(const float* weights) {
  if constexpr (kGroup == 1) {
    return load(weights);
  } else {
    return pairwise_add(group_sums<kGroup / 2>(weights),
                        group_sums<kGroup / 2>(weights + kGroup / 2 * kLanes));
  }
}

/// Returns how many groups were done; the rest does not fill a vector.
template <int kGroup>
int64_t sum_whole_vectors(const float* weights, int64_t tokens, float* sums) {
  const int64_t groups = tokens / (kGroup * kLanes) * kLanes;
  for (int64_t group = 0; group < groups; group += kLanes) {
    store(group_sums<kGroup>(weights + group * kGroup), sums + group);
  }
  return groups;
}

int64_t sum_vectors(const float* weights, int64_t tokens, int64_t group_tokens, float* sums) {
  switch (group_tokens) {
    case 1:
      return sum_whole_vectors<1>(weights, tokens, sums);
    case 2:
      return sum_whole_vectors<2>(weights, tokens, sums);
    case 4:
      return sum_whole_vectors<4>(weights, tokens, sums);
    case 8:
      return sum_whole_vectors<8>(weights, tokens, sums);
    case 16:
      return sum_whole_vectors<16>(weights, tokens, sums);
    default:
      return 0;
  }
}

void sum_groups(const float* weights, int64_t tokens, int64_t group_tokens, float* sums) {
  int64_t group = sum_vectors(weights, tokens, group_tokens, sums);
  for (; group * group_tokens < tokens; ++group) {
    const int64_t last = std::min((group + 1) * group_tokens, tokens);
    float sum = 0.0f;
    for (int64_t token = group * group_tokens; token < last; ++token) sum += weights[token];
    sums[group] = sum;
  }
}

void weigh_groups(const WeighGroupsArgs& args) {
  const int64_t groups = (args.tokens + args.group_tokens - 1) / args.group_tokens;
  thread_local std::vector<float> weights;  // [tokens]
  weights.resize(round_up_to_lanes(args.tokens));
  for (int64_t head = 0; head < args.heads; ++head) {
    const float* logits = args.logits + head * args.logit_stride;
    float* of_groups = args.weights + head * groups;
    args.largest[head] = largest_logit(logits, args.tokens);
    args.sums[head] = 0.0f;
    if (args.largest[head] == kNever) {
      std::fill_n(of_groups, groups, 0.0f);
      continue;
    }
    weigh_tokens(logits, args.tokens, args.largest[head], weights.data());
    sum_groups(weights.data(), args.tokens, args.group_tokens, of_groups);
    Floats total = zeros();
    for (int64_t t = 0; t < args.tokens; t += kLanes) total = add(total, load(weights.data() + t));
    args.sums[head] = sum(total);
  }
}

void join_heads(const JoinHeadsArgs& args) {
  const bool is_sum = args.join == HeadJoin::kSum;
  for (int64_t group = 0; group < args.groups; group += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, args.groups - group);
    Floats joined = zeros();
    Floats counted = zeros();
    for (int64_t head = 0; head < args.heads; ++head) {
      const float* source = args.weights + head * args.groups + group;
      const Floats weights = count == kLanes ? load(source) : load_some(source, count);
      const Floats mass = multiply(weights, fill(args.factors[head]));
      joined = is_sum ? add(joined, mass) : maximum(joined, mass);
      counted = maximum(counted, weights);
    }
    const Floats scores =
        where_greater(counted, zeros(), maximum(joined, fill(kSmallest)), fill(kNever));
    store_some(scores, args.group_scores + group, count);
  }
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(weigh_groups);
KVSWAP_EXPORT(join_heads);

void weigh_groups(const WeighGroupsArgs& args) { KVSWAP_DISPATCH(weigh_groups)(args); }

void mass_factors(const MassFactorsArgs& args) {
  for (int64_t head = 0; head < args.heads; ++head) {
    float kept = args.kept_log_sum_exp ? args.kept_log_sum_exp[head * args.kept_stride] : kNever;
    if (std::isnan(kept)) kept = kNever;
    float reference = kept;
    for (int64_t piece = 0; piece < args.pieces; ++piece) {
      reference = std::max(reference, args.largest[piece * args.heads + head]);
    }
    const bool is_finite = std::isfinite(reference);
    float total = is_finite ? std::exp(kept - reference) : 0.0f;
    for (int64_t piece = 0; piece < args.pieces; ++piece) {
      const int64_t at = piece * args.heads + head;
      args.factors[at] = is_finite ? std::exp(args.largest[at] - reference) : 0.0f;
      total += args.factors[at] * args.sums[at];
    }
    for (int64_t piece = 0; is_finite && piece < args.pieces; ++piece) {
      args.factors[piece * args.heads + head] /= total;
    }
  }
}

void join_heads(const JoinHeadsArgs& args) { KVSWAP_DISPATCH(join_heads)(args); }

void group_mass(const GroupMassArgs& args) {
  const int64_t groups = (args.tokens + args.group_tokens - 1) / args.group_tokens;
  std::vector<float> scratch(args.heads * (groups + 3));
  float* largest = scratch.data() + args.heads * groups;
  float* sums = largest + args.heads;
  float* factors = sums + args.heads;
  weigh_groups({.logits = args.logits,
                .weights = scratch.data(),
                .largest = largest,
                .sums = sums,
                .logit_stride = args.tokens,
                .tokens = args.tokens,
                .group_tokens = args.group_tokens,
                .heads = args.heads});
  mass_factors({.largest = largest,
                .sums = sums,
                .kept_log_sum_exp = args.kept_log_sum_exp,
                .factors = factors,
                .pieces = 1,
                .heads = args.heads});
  join_heads({.weights = scratch.data(),
              .factors = factors,
              .group_scores = args.group_scores,
              .groups = groups,
              .heads = args.heads,
              .join = args.join});
}

}  // namespace kvswap
#endif  // HWY_ONCE
