#include "methods/retention/compresskv.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "io/status.h"

namespace kvswap {

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
  int64_t missing =
      layers * args.average - std::accumulate(tokens.begin(), tokens.end(), int64_t{0});
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
