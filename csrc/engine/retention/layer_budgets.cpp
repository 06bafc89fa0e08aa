#include "engine/retention/layer_budgets.h"

#include <algorithm>
#include <utility>

#include "methods/retention/compresskv.h"

namespace kvswap {
namespace {

std::vector<int64_t> most_of(const EngineOptions& options, const RetentionPlan& retention) {
  if (options.keep_layer_shares.empty()) {
    const int64_t unit = retention.kind.keeps_whole_groups ? options.group_tokens : 1;
    return std::vector<int64_t>(options.layers, retention.in_dtype_max / unit * unit);
  }
  return divide_by_share({.shares = options.keep_layer_shares,
                          .average = options.keep_tokens,
                          .least = options.keep_layer_least,
                          .most = retention.in_dtype_max});
}

/// What a layer would keep, the best first.
const std::vector<int32_t>& order_of(const RetainedTokens& retained) {
  return retained.next ? *retained.next : retained.ranked;
}

}  // namespace

LayerBudgets::LayerBudgets(EngineContext& context, Batch& batch, RetainedPages& retained_pages)
    : context_(context),
      batch_(batch),
      retained_pages_(retained_pages),
      most_(most_of(context.options, context.retention)) {}

Status LayerBudgets::adopt() {
  const int64_t apart = context_.options.heads_apart;
  for (int64_t first = 0; first < batch_.size(); first += apart) {
    const std::vector<int64_t> tokens = tokens_of(first);
    for (int64_t sequence = first; sequence < first + apart; ++sequence) {
      KVSWAP_RETURN_IF_ERROR(adopt_for(sequence, tokens));
    }
  }
  return Status::ok();
}

Status LayerBudgets::adopt_for(int64_t sequence, const std::vector<int64_t>& tokens) {
  SequencePages& pages = batch_.pages(sequence);
  for (int64_t layer = 0; layer < context_.options.layers; ++layer) {
    pages.hold_retained(layer, pages.retained(layer).count());  // what a crop left
  }
  // Layers that need no more pages make room for the others.
  for (const bool grows : {false, true}) {
    for (int64_t layer = 0; layer < context_.options.layers; ++layer) {
      const RetainedTokens& retained = pages.retained(layer);
      const int64_t wanted = std::min<int64_t>(order_of(retained).size(), tokens[layer]);
      if ((wanted > retained.count()) != grows) continue;
      KVSWAP_RETURN_IF_ERROR(adopt_in(layer, sequence, wanted));
    }
  }
  return Status::ok();
}

Status LayerBudgets::adopt_in(int64_t layer, int64_t sequence, int64_t tokens) {
  RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  if (!retained.next && tokens == retained.count()) return Status::ok();
  std::vector<int32_t> ranked = order_of(retained);
  ranked.resize(tokens);
  std::vector<int32_t> positions = ranked;
  std::sort(positions.begin(), positions.end());
  KVSWAP_RETURN_IF_ERROR(retained_pages_.adopt(layer, sequence, std::move(positions)));
  retained.ranked = std::move(ranked);
  if (!retained.next) return Status::ok();
  retained.end_refresh(batch_.layer(layer).sealed_groups * context_.options.group_tokens);
  ++context_.counters.refreshes;
  return Status::ok();
}

/// Of each layer, the same for all heads that are apart; 0 of those that were never weighed.
std::vector<int64_t> LayerBudgets::tokens_of(int64_t first_part) const {
  const EngineOptions& options = context_.options;
  std::vector<LayerPrompt> prompts;
  std::vector<int64_t> weighed;
  int64_t retention = 0;
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    retention += context_.plan.keeps_tokens(layer) ? 1 : 0;
    LayerPrompt prompt;
    bool is_weighed = false;
    for (int64_t sequence = first_part; sequence < first_part + options.heads_apart; ++sequence) {
      const RetainedTokens& retained = batch_.pages(sequence).retained(layer);
      if (!retained.spread) continue;
      is_weighed = true;
      prompt.spread.dispersion += retained.spread->dispersion;
      prompt.spread.change += retained.spread->change;
      prompt.candidates = std::max(prompt.candidates, retained.candidates);
    }
    if (!is_weighed) continue;
    weighed.push_back(layer);
    prompts.push_back(prompt);
  }
  const std::vector<int64_t> divided =
      context_.retention.policy->divide(prompts, retention * options.keep_tokens);
  std::vector<int64_t> tokens(options.layers, 0);
  for (size_t i = 0; i < weighed.size(); ++i) tokens[weighed[i]] = divided[i];
  return tokens;
}

}  // namespace kvswap
