#include "kernels/group_mass.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
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
inline constexpr float kFarBelow = -126.0f;  // 2 to the power of it is the smallest normal number

/// Products of one head, and what makes them exponents of 2.
struct HeadProducts {
  const float* products = nullptr;  // [tokens]
  int64_t tokens = 0;
  float factor = 0;
};

/// NaN and -inf: no candidate. What is too large or too small for a float is its last number.
inline Floats exponents_of(Floats products, float factor) {
  const Floats own = nan_to(multiply(products, fill(factor)), kNever);
  const Floats below = where_greater(own, fill(kLargestFinite), fill(kLargestFinite), own);
  return where_greater(nan_to(products, kNever), fill(kNever),
                       where_greater(fill(-kLargestFinite), below, fill(-kLargestFinite), below),
                       fill(kNever));
}

/// In whole vectors: what is missing of the last one is no candidate.
Floats exponents_at(const HeadProducts& head, int64_t token) {
  if (token + kLanes <= head.tokens) {
    return exponents_of(load(head.products + token), head.factor);
  }
  float lanes[kLanes];
  std::fill_n(lanes, kLanes, kNever);
  std::copy(head.products + token, head.products + head.tokens, lanes);
  return exponents_of(load(lanes), head.factor);
}

float largest_exponent(const HeadProducts& head) {
  if (std::isnan(head.factor)) return kNever;
  Floats lanes = fill(kNever);
  for (int64_t t = 0; t < head.tokens; t += kLanes) lanes = maximum(exponents_at(head, t), lanes);
  return largest(lanes);
}

/// The same where products are expected to be finite. A NaN may be lost, or not.
float largest_finite_exponent(const HeadProducts& head) {
  Floats lanes = fill(kNever);
  int64_t t = 0;
  for (; t + kLanes <= head.tokens; t += kLanes) lanes = maximum(load(head.products + t), lanes);
  float most = largest(lanes);
  for (; t < head.tokens; ++t) most = std::max(most, head.products[t]);
  return most * head.factor;
}

/// The weights of whole vectors from token `first` on, one by one; 0: no candidate.
void weigh_tokens(const HeadProducts& head, int64_t first, float largest, float* weights) {
  for (int64_t t = first; t < head.tokens; t += kLanes) {
    const Floats own = exponents_at(head, t);
    const Floats below = maximum(add(own, fill(-largest)), fill(kFarBelow));
    store(where_greater(own, fill(kNever), power_of_two(below), zeros()), weights + t - first);
  }
}

/// The sums of kLanes groups of kGroup consecutive weights, where all tokens are candidates.
template <int kGroup>
inline Floats finite_sums(const float* products, Floats factor, Floats below) {
  if constexpr (kGroup == 1) {
    const Floats exponents = multiply_add(load(products), factor, below);
    return power_of_two(maximum(exponents, fill(kFarBelow)));
  } else {
    constexpr int64_t kHalf = kGroup / 2 * kLanes;
    return pairwise_add(finite_sums<kGroup / 2>(products, factor, below),
                        finite_sums<kGroup / 2>(products + kHalf, factor, below));
  }
}

/// Returns how many groups were done; the rest does not fill a vector.
template <int kGroup>
int64_t weigh_whole_vectors(const HeadProducts& head, float largest, float* sums, float* total) {
  const int64_t groups = head.tokens / (kGroup * kLanes) * kLanes;
  Floats all = zeros();
  for (int64_t group = 0; group < groups; group += kLanes) {
    const Floats own =
        finite_sums<kGroup>(head.products + group * kGroup, fill(head.factor), fill(-largest));
    store(own, sums + group);
    all = add(all, own);
  }
  *total = sum(all);
  return groups;
}

int64_t weigh_finite(const HeadProducts& head, int64_t group_tokens, float largest, float* sums,
                     float* total) {
  switch (group_tokens) {
    case 1:
      return weigh_whole_vectors<1>(head, largest, sums, total);
    case 2:
      return weigh_whole_vectors<2>(head, largest, sums, total);
    case 4:
      return weigh_whole_vectors<4>(head, largest, sums, total);
    case 8:
      return weigh_whole_vectors<8>(head, largest, sums, total);
    case 16:
      return weigh_whole_vectors<16>(head, largest, sums, total);
    default:
      return 0;
  }
}

/// Groups from `group` on, token by token. Returns the sum of their weights.
float weigh_rest(const HeadProducts& head, int64_t group_tokens, float largest, int64_t group,
                 float* sums) {
  const int64_t first = group * group_tokens;
  if (first >= head.tokens) return 0.0f;
  thread_local std::vector<float> weights;  // [tokens]
  weights.resize(round_up_to_lanes(head.tokens - first));
  weigh_tokens(head, first, largest, weights.data());
  float total = 0.0f;
  for (; group * group_tokens < head.tokens; ++group) {
    const int64_t last = std::min((group + 1) * group_tokens, head.tokens);
    float sum = 0.0f;
    for (int64_t token = group * group_tokens; token < last; ++token) sum += weights[token - first];
    sums[group] = sum;
    total += sum;
  }
  return total;
}

/// Groups with a product that is no number, of a head that is one.
void mark_groups(const HeadProducts& head, int64_t group_tokens, float* sums) {
  if (std::isnan(head.factor)) return;
  for (int64_t token = 0; token < head.tokens; ++token) {
    if (std::isnan(head.products[token])) sums[token / group_tokens] = kAlways;
  }
}

void weigh_groups(const WeighGroupsArgs& args) {
  const int64_t groups = (args.tokens + args.group_tokens - 1) / args.group_tokens;
  for (int64_t i = 0; i < args.heads; ++i) {
    const HeadProducts head = {args.products + i * args.product_stride, args.tokens,
                               args.factors[i]};
    float* weights = args.weights + i * args.weight_stride;
    if (!args.has_gaps) {
      args.largest[i] = largest_finite_exponent(head);
      float total = 0.0f;
      const int64_t done = weigh_finite(head, args.group_tokens, args.largest[i], weights, &total);
      args.sums[i] = total + weigh_rest(head, args.group_tokens, args.largest[i], done, weights);
      if (std::isfinite(args.largest[i]) && std::isfinite(args.sums[i])) continue;
    }
    // What overflowed or is no number makes a token no candidate, not the head useless.
    args.largest[i] = largest_exponent(head);
    if (args.largest[i] == kNever) {
      std::fill_n(weights, groups, 0.0f);
      args.sums[i] = 0.0f;
    } else {
      args.sums[i] = weigh_rest(head, args.group_tokens, args.largest[i], 0, weights);
    }
    mark_groups(head, args.group_tokens, weights);
  }
}

void join_heads(const JoinHeadsArgs& args) {
  const bool is_sum = args.join == HeadJoin::kSum;
  for (int64_t group = 0; group < args.groups; group += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, args.groups - group);
    Floats joined = zeros();
    Floats counted = zeros();
    for (int64_t head = 0; head < args.heads; ++head) {
      const float* source = args.weights + head * args.weight_stride + group;
      const Floats weights = count == kLanes ? load(source) : load_some(source, count);
      const Floats mass = multiply(weights, fill(args.shares[head]));
      joined = is_sum ? add(joined, mass) : maximum(joined, mass);
      counted = maximum(counted, weights);
    }
    const Floats scores =
        where_greater(counted, zeros(), maximum(joined, fill(kSmallest)), fill(kNever));
    const Floats marked = where_greater(counted, fill(kLargestFinite), fill(kAlways), scores);
    store_some(marked, args.group_scores + group, count);
  }
}

}  // namespace kvswap::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvswap {

KVSWAP_EXPORT(weigh_groups);
KVSWAP_EXPORT(join_heads);

void weigh_groups(const WeighGroupsArgs& args) { KVSWAP_DISPATCH(weigh_groups)(args); }

void mass_shares(const MassSharesArgs& args) {
  for (int64_t head = 0; head < args.heads; ++head) {
    float reference = kNever;
    for (int64_t piece = 0; piece < args.pieces; ++piece) {
      reference = std::max(reference, args.largest[piece * args.heads + head]);
    }
    const bool has_candidates = reference > kNever;
    float total = 0.0f;
    for (int64_t piece = 0; piece < args.pieces; ++piece) {
      const int64_t at = piece * args.heads + head;
      args.shares[at] = has_candidates ? std::exp2(args.largest[at] - reference) : 0.0f;
      total += args.shares[at] * args.sums[at];
    }
    for (int64_t piece = 0; has_candidates && piece < args.pieces; ++piece) {
      args.shares[piece * args.heads + head] /= total;
    }
  }
}

void join_heads(const JoinHeadsArgs& args) { KVSWAP_DISPATCH(join_heads)(args); }

void group_mass(const GroupMassArgs& args) {
  const int64_t groups = (args.tokens + args.group_tokens - 1) / args.group_tokens;
  const std::vector<float> factors(args.heads, std::numbers::log2e_v<float>);
  std::vector<float> scratch(args.heads * (groups + 3));
  float* largest = scratch.data() + args.heads * groups;
  float* sums = largest + args.heads;
  float* shares = sums + args.heads;
  weigh_groups({.products = args.logits,
                .factors = factors.data(),
                .weights = scratch.data(),
                .largest = largest,
                .sums = sums,
                .product_stride = args.tokens,
                .weight_stride = groups,
                .tokens = args.tokens,
                .group_tokens = args.group_tokens,
                .heads = args.heads});
  mass_shares(
      {.largest = largest, .sums = sums, .shares = shares, .pieces = 1, .heads = args.heads});
  join_heads({.weights = scratch.data(),
              .shares = shares,
              .group_scores = args.group_scores,
              .weight_stride = groups,
              .groups = groups,
              .heads = args.heads,
              .join = args.join});
}

}  // namespace kvswap
#endif  // HWY_ONCE
