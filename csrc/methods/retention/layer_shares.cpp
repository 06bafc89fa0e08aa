#include "methods/retention/layer_shares.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "io/status.h"

namespace kvswap {
namespace {

/// Each layer below its limit has as many more, the first ones one more than the others.
void add_evenly(std::vector<int64_t>& tokens, std::span<const int64_t> limits, int64_t more) {
  std::vector<size_t> open;
  for (size_t layer = 0; layer < tokens.size(); ++layer) {
    if (tokens[layer] < limits[layer]) open.push_back(layer);
  }
  const auto count = static_cast<int64_t>(open.size());
  for (int64_t i = 0; i < count; ++i) tokens[open[i]] += more / count + (i < more % count ? 1 : 0);
}

int64_t sum(std::span<const int64_t> values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

/// Among these layers at once.
std::vector<int64_t> divide_once(std::span<const double> preferences,
                                 std::span<const int64_t> limits, int64_t total) {
  const double all = std::accumulate(preferences.begin(), preferences.end(), 0.0);
  std::vector<int64_t> tokens(preferences.size(), 0);
  int64_t excess = 0;
  for (size_t layer = 0; all > 0 && layer < tokens.size(); ++layer) {
    const auto wanted = static_cast<int64_t>(preferences[layer] / all * static_cast<double>(total));
    tokens[layer] = std::min(wanted, limits[layer]);
    excess += wanted - tokens[layer];
  }
  add_evenly(tokens, limits, excess);
  add_evenly(tokens, limits, total - sum(tokens));
  return tokens;
}

}  // namespace

void AttentionSpread::add(double received) {
  if (received > 0) dispersion -= received * std::log(received);
}

double AttentionSpread::preference(std::span<const double> temperatures) const {
  KVSWAP_ASSERT(temperatures.size() == 2);
  if (!(dispersion > 0) || !(change > 0)) return 0;
  return std::pow(dispersion, 1 / temperatures[0]) * std::pow(change, 1 / temperatures[1]);
}

std::vector<int64_t> divide_by_preference(std::span<const double> preferences,
                                          std::span<const int64_t> limits, int64_t total) {
  KVSWAP_ASSERT(preferences.size() == limits.size());
  std::vector<int64_t> tokens(limits.begin(), limits.end());
  for (size_t there = 1; there <= tokens.size(); ++there) {
    const std::vector<int64_t> divided =
        divide_once(preferences.first(there), limits.first(there), total);
    for (size_t layer = 0; layer < there; ++layer) {
      tokens[layer] = std::min(tokens[layer], divided[layer]);
    }
  }
  return tokens;
}

std::vector<int64_t> divide_by_share(const ShareArgs& args) {
  const auto layers = static_cast<int64_t>(args.shares.size());
  const double all = std::accumulate(args.shares.begin(), args.shares.end(), 0.0);
  KVSWAP_ASSERT(all > 0 && args.least <= args.average && args.average <= args.most);
  const auto left = static_cast<double>(layers * (args.average - args.least));
  std::vector<int64_t> tokens;
  for (const double share : args.shares) {
    const auto extra = static_cast<int64_t>(std::nearbyint(share / all * left));
    tokens.push_back(std::clamp(args.least + extra, args.least, args.most));
  }
  std::vector<int64_t> order(layers);
  std::iota(order.begin(), order.end(), int64_t{0});
  int64_t missing = layers * args.average - sum(tokens);
  const bool takes = missing > 0;
  std::stable_sort(order.begin(), order.end(), [&](int64_t one, int64_t other) {
    return takes ? args.shares[one] > args.shares[other] : args.shares[one] < args.shares[other];
  });
  while (missing != 0) {
    for (const int64_t layer : order) {
      if (missing == 0) break;
      if (tokens[layer] == (takes ? args.most : args.least)) continue;
      tokens[layer] += takes ? 1 : -1;
      missing -= takes ? 1 : -1;
    }
  }
  return tokens;
}

}  // namespace kvswap
