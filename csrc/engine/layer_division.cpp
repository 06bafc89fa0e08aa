#include "engine/layer_division.h"

#include <algorithm>
#include <utility>

#include "methods/layer_tokens.h"

namespace kvswap {
namespace {

std::vector<int64_t> most_of(const EngineOptions& options, const KeepPlan& keep) {
  if (options.keep_layer_shares.empty()) {
    const int64_t unit = keep.kind.keeps_outliers ? options.group_tokens : 1;
    return std::vector<int64_t>(options.layers, keep.in_dtype_max / unit * unit);
  }
  return divide_by_share({.shares = options.keep_layer_shares,
                          .average = options.keep_tokens,
                          .least = options.keep_layer_least,
                          .most = keep.in_dtype_max});
}

/// What a layer would keep, the best first.
const std::vector<int32_t>& order_of(const KeptTokens& kept) {
  return kept.next ? *kept.next : kept.ranked;
}

}  // namespace

LayerDivision::LayerDivision(EngineParts& parts, Batch& batch, KeptPages& kept_pages)
    : parts_(parts),
      batch_(batch),
      kept_pages_(kept_pages),
      most_(most_of(parts.options, parts.keep)) {}

Status LayerDivision::adopt() {
  const int64_t apart = parts_.options.heads_apart;
  for (int64_t first = 0; first < batch_.size(); first += apart) {
    const std::vector<int64_t> tokens = tokens_of(first);
    for (int64_t part = first; part < first + apart; ++part) {
      KVSWAP_RETURN_IF_ERROR(adopt_for(part, tokens));
    }
  }
  return Status::ok();
}

Status LayerDivision::adopt_for(int64_t part, const std::vector<int64_t>& tokens) {
  SequencePages& pages = batch_.pages(part);
  for (int64_t layer = 0; layer < parts_.options.layers; ++layer) {
    pages.hold_kept(layer, pages.kept(layer).count());  // what a crop left
  }
  // Layers that need no more pages make room for the others.
  for (const bool grows : {false, true}) {
    for (int64_t layer = 0; layer < parts_.options.layers; ++layer) {
      const KeptTokens& kept = pages.kept(layer);
      const int64_t wanted = std::min<int64_t>(order_of(kept).size(), tokens[layer]);
      if ((wanted > kept.count()) != grows) continue;
      KVSWAP_RETURN_IF_ERROR(adopt_in(layer, part, wanted));
    }
  }
  return Status::ok();
}

Status LayerDivision::adopt_in(int64_t layer, int64_t part, int64_t tokens) {
  KeptTokens& kept = batch_.pages(part).kept(layer);
  if (!kept.next && tokens == kept.count()) return Status::ok();
  std::vector<int32_t> ranked = order_of(kept);
  ranked.resize(tokens);
  std::vector<int32_t> positions = ranked;
  std::sort(positions.begin(), positions.end());
  KVSWAP_RETURN_IF_ERROR(kept_pages_.adopt(layer, part, std::move(positions)));
  kept.ranked = std::move(ranked);
  if (!kept.next) return Status::ok();
  kept.end_turn(batch_.layer(layer).sealed_groups * parts_.options.group_tokens);
  ++parts_.counters.turns;
  return Status::ok();
}

/// Of each layer, the same for all heads that are apart; 0 of those that were never weighed.
std::vector<int64_t> LayerDivision::tokens_of(int64_t first_part) const {
  const EngineOptions& options = parts_.options;
  std::vector<double> preferences;
  std::vector<int64_t> limits, weighed;
  int64_t keeping = 0;
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    keeping += parts_.plan.keeps_tokens(layer) ? 1 : 0;
    AttentionSpread all;
    int64_t candidates = 0;
    bool is_weighed = false;
    for (int64_t part = first_part; part < first_part + options.heads_apart; ++part) {
      const KeptTokens& kept = batch_.pages(part).kept(layer);
      if (!kept.spread) continue;
      is_weighed = true;
      all.dispersion += kept.spread->dispersion;
      all.change += kept.spread->change;
      candidates = std::max(candidates, kept.candidates);
    }
    if (!is_weighed) continue;
    weighed.push_back(layer);
    preferences.push_back(all.preference(options.keep_preference));
    limits.push_back(candidates);
  }
  const std::vector<int64_t> divided =
      divide_by_preference(preferences, limits, keeping * options.keep_tokens);
  std::vector<int64_t> tokens(options.layers, 0);
  for (size_t i = 0; i < weighed.size(); ++i) tokens[weighed[i]] = divided[i];
  return tokens;
}

}  // namespace kvswap
