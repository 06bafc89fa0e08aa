#include "engine/retention/user_token_scores.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "engine/setting_names.h"

namespace kvswap {

Status UserTokenScores::check(int64_t layer, const TokenScores& given) const {
  const EngineOptions& options = context_.options;
  const std::string shown = "give_worth: layer " + std::to_string(layer) + " ";
  if (context_.retention.kind.scored_by != ScoredBy::kUser) {
    return Status::invalid(
        shown + "must have retention.policy user to be told what tokens are worth, has " +
        file_word("keeper", options.keeper));
  }
  if (!context_.plan.keeps_tokens(layer)) {
    return Status::invalid(shown +
                           "must keep tokens to be told what they are worth, and "
                           "attends everything");
  }
  const int64_t positions = batch_.layer(layer).positions;
  const bool fits = given.tokens >= 1 && given.tokens <= positions;
  if (given.sequences != batch_.size() || !fits) {
    return Status::invalid(shown + "must be told of " + std::to_string(batch_.size()) +
                           " sequences and of at most its " + std::to_string(positions) +
                           " tokens, got " + std::to_string(given.sequences) + " and " +
                           std::to_string(given.tokens));
  }
  const auto is_wrong = [](float number) { return std::isnan(number); };
  const int64_t count = given.sequences * given.tokens;
  if (std::any_of(given.importance, given.importance + count, is_wrong) ||
      (given.decay != nullptr && std::any_of(given.decay, given.decay + count, is_wrong))) {
    return Status::invalid(shown + "must be told numbers, got NaN");
  }
  return Status::ok();
}

Status UserTokenScores::give(int64_t layer, const TokenScores& given) {
  const EngineOptions& options = context_.options;
  KVSWAP_RETURN_IF_ERROR(check(layer, given));
  const int64_t positions = batch_.layer(layer).positions;
  const int64_t first = positions - given.tokens;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    RetainedTokens& retained = batch_.pages(sequence).retained(layer);
    if (static_cast<int64_t>(retained.mass.size()) < first) {
      return Status::invalid("give_worth: layer " + std::to_string(layer) +
                             " must be told of all tokens since its " +
                             std::to_string(retained.mass.size()) + "th, got those since its " +
                             std::to_string(first) + "th");
    }
    grow_mass(retained.mass, positions);
    grow_mass(retained.decay, positions);
    std::copy_n(given.importance + sequence * given.tokens, given.tokens,
                retained.mass.begin() + first);
    std::fill_n(retained.decay.begin() + first, given.tokens, 0.0f);
    if (given.decay != nullptr) {
      std::copy_n(given.decay + sequence * given.tokens, given.tokens,
                  retained.decay.begin() + first);
    }
    const int64_t fresh = std::clamp<int64_t>(positions - retained.seen_positions, 0, given.tokens);
    retained.seen_positions = std::max(retained.seen_positions, positions);
    if (first < batch_.layer(layer).prefilled) {
      retained.note_chunk(first);
    } else {
      retained.count_queries(fresh, options.keep_interval);
    }
  }
  return Status::ok();
}

Status UserTokenScores::replace(int64_t layer, const TokenScores& given) {
  KVSWAP_RETURN_IF_ERROR(check(layer, given));
  const std::string shown = "give_worth: layer " + std::to_string(layer) + " ";
  const int64_t positions = batch_.layer(layer).positions;
  if (given.tokens != positions) {
    return Status::invalid(shown + "must be told anew of all its " + std::to_string(positions) +
                           " tokens, got " + std::to_string(given.tokens));
  }
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    const auto told = std::ssize(batch_.pages(sequence).retained(layer).mass);
    if (told >= positions) continue;
    return Status::invalid(shown + "must be told of its " + std::to_string(positions) +
                           " tokens before it is told anew, got " + std::to_string(told));
  }
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    RetainedTokens& retained = batch_.pages(sequence).retained(layer);
    for (int64_t i = 0; i < positions; ++i) {
      const int64_t from = sequence * positions + i;
      retained.decay[i] = given.decay == nullptr ? 0.0f : given.decay[from];
      // score() counts from the token on; so much of it is past.
      retained.mass[i] =
          given.importance[from] + static_cast<float>(positions - i) * retained.decay[i];
    }
  }
  return Status::ok();
}

Status UserTokenScores::check_given(int64_t layer, int64_t sequence) const {
  const RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  const int64_t sealed = batch_.layer(layer).sealed_groups * context_.options.group_tokens;
  if (context_.retention.kind.scored_by != ScoredBy::kUser ||
      static_cast<int64_t>(retained.mass.size()) >= sealed) {
    return Status::ok();
  }
  return Status::invalid("attend: layer " + std::to_string(layer) + " must be told what its " +
                         std::to_string(sealed) + " tokens on disk are worth, got " +
                         std::to_string(retained.mass.size()) +
                         "; call give_worth() after each append");
}

void UserTokenScores::score(int64_t layer, int64_t sequence, std::vector<float>& mass) const {
  const RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  const int64_t positions = batch_.layer(layer).positions;
  const int64_t sealed = batch_.layer(layer).sealed_groups * context_.options.group_tokens;
  mass.clear();
  grow_mass(mass, sealed);
  for (int64_t i = 0; i < sealed; ++i) {
    const float now = retained.mass[i] - static_cast<float>(positions - i) * retained.decay[i];
    // Of an infinite decay nothing is left.
    mass[i] = std::isnan(now) ? -std::numeric_limits<float>::infinity() : now;
  }
}

}  // namespace kvswap
