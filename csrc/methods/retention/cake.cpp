#include "methods/retention/cake.h"

#include <algorithm>
#include <cmath>
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
  const int64_t taken = std::accumulate(tokens.begin(), tokens.end(), int64_t{0});
  add_evenly(tokens, limits, total - taken);
  return tokens;
}

}  // namespace

double Cake::preference(const AttentionSpread& spread) const {
  const std::vector<double>& temperatures = options_.preference_temperatures;
  KVSWAP_ASSERT(temperatures.size() == 2);
  if (!(spread.dispersion > 0) || !(spread.change > 0)) return 0;
  return std::pow(spread.dispersion, 1 / temperatures[0]) *
         std::pow(spread.change, 1 / temperatures[1]);
}

std::vector<int64_t> Cake::divide(std::span<const LayerPrompt> layers, int64_t total) const {
  std::vector<double> preferences;
  std::vector<int64_t> limits;
  for (const LayerPrompt& layer : layers) {
    preferences.push_back(preference(layer.spread));
    limits.push_back(layer.candidates);
  }
  std::vector<int64_t> tokens = limits;
  for (size_t there = 1; there <= tokens.size(); ++there) {
    const std::span<const double> preferred(preferences.data(), there);
    const std::vector<int64_t> divided = divide_once(preferred, {limits.data(), there}, total);
    for (size_t layer = 0; layer < there; ++layer) {
      tokens[layer] = std::min(tokens[layer], divided[layer]);
    }
  }
  return tokens;
}

}  // namespace kvswap
