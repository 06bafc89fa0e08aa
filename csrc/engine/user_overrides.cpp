#include "engine/user_overrides.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kvswap {

bool UserOverrides::needs_scores(int64_t layer, int64_t queries) {
  if (!context_.plan.rows.is_given) return false;
  steps_.drain();
  return !context_.plan.is_exact(layer) && !batch_.all_fit(layer) && !exact_chunks_.takes(layer) &&
         !steps_.of(layer).is_for(queries);
}

Status UserOverrides::take_scores(int64_t layer, const UserScores& scores) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter(layer));
  const EngineOptions& options = context_.options;
  if (context_.plan.is_exact(layer)) {
    return Status::invalid("give_scores: layer " + std::to_string(layer) +
                           " must choose to take scores, and attends everything");
  }
  const int64_t groups = batch_.layer(layer).sealed_groups;
  const bool fits = scores.sequences == batch_.size() && scores.groups == groups &&
                    scores.queries >= 1 && scores.queries <= options.select_queries_max;
  if (!fits) {
    return Status::invalid(
        "give_scores: scores of layer " + std::to_string(layer) + " must be of " +
        std::to_string(batch_.size()) + " sequences, 1.." +
        std::to_string(options.select_queries_max) + " queries and " + std::to_string(groups) +
        " groups, got " + std::to_string(scores.sequences) + ", " + std::to_string(scores.queries) +
        " and " + std::to_string(scores.groups));
  }
  return context_.selector->give_scores(layer, scores);
}

Status UserOverrides::set_token_importance(int64_t layer, const TokenScores& importance) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter(layer));
  return importance.of == TokenScores::Of::kAll ? importances_.replace(layer, importance)
                                                : importances_.give(layer, importance);
}

Status UserOverrides::take_choice(int64_t layer, std::vector<std::vector<int32_t>> groups,
                                  std::vector<std::vector<int32_t>> predicted) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter(layer));
  return steps_.of(layer).override_with(std::move(groups), std::move(predicted));
}

Status UserOverrides::take_tokens(int64_t layer,
                                  const std::vector<std::vector<int64_t>>& positions) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter(layer));
  if (std::ssize(positions) != batch_.size()) {
    return Status::invalid("give_tokens: positions must be given for each of " +
                           std::to_string(batch_.size()) + " sequences, got " +
                           std::to_string(positions.size()));
  }
  if (context_.retention.pages > 0 || context_.plan.has_clusters || context_.plan.is_exact(layer)) {
    return Status::invalid(
        "give_tokens: layer " + std::to_string(layer) +
        " must choose groups of tokens and keep none beside them, so that each has its place");
  }
  const int64_t held = batch_.layer(layer).positions;
  std::vector<std::vector<int32_t>> narrow;
  for (const std::vector<int64_t>& of_sequence : positions) {
    std::vector<int32_t>& own = narrow.emplace_back(of_sequence.begin(), of_sequence.end());
    std::ranges::sort(own);
    const bool is_inside =
        std::ranges::all_of(of_sequence, [=](int64_t one) { return one >= 0 && one < held; });
    if (is_inside) continue;
    return Status::invalid("give_tokens: positions must lie in 0.." + std::to_string(held - 1) +
                           ", as many as layer " + std::to_string(layer) + " holds");
  }
  table_.see_only(layer, std::move(narrow));
  return Status::ok();
}

Status UserOverrides::take_validity(int64_t batch, int64_t positions, const bool* valid) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter());
  const int64_t apart = context_.options.heads_apart;
  const int64_t held = batch_.size() == 0 ? 0 : batch_.layer(0).positions;
  if (batch != batch_.size() / apart || positions != held) {
    return Status::invalid("declare_held: the mask must be of what is held, " +
                           std::to_string(batch_.size() / apart) + " x " + std::to_string(held) +
                           " positions, got " + std::to_string(batch) + " x " +
                           std::to_string(positions));
  }
  std::vector<std::vector<int64_t>> later_padding(batch_.size());
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    const PaddingMask& validity = batch_.validity(sequence);
    for (int64_t position = 0; position < positions; ++position) {
      const bool counts = valid[sequence / apart * positions + position];
      // What was left out of every summary cannot be attended any more.
      if (counts && !validity.came_valid(position)) {
        return Status::invalid("declare_held: position " + std::to_string(position) +
                               " of sequence " + std::to_string(sequence / apart) +
                               " must stay padding, as it came, got valid; crop() it away first");
      }
      if (!counts && validity.came_valid(position)) later_padding[sequence].push_back(position);
    }
  }
  // Chosen for what counted before.
  KVSWAP_RETURN_IF_ERROR(steps_.drop_all());
  batch_.change_validity([&](int64_t sequence, PaddingMask& validity) {
    validity.set_later_padding(std::move(later_padding[sequence]));
  });
  return Status::ok();
}

}  // namespace kvswap
