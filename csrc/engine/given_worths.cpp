#include "engine/given_worths.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace kvswap {

Status GivenWorths::check(int64_t layer, const GivenWorth& given) const {
  const EngineOptions& options = parts_.options;
  const std::string shown = "give_worth: layer " + std::to_string(layer) + " ";
  if (!parts_.keep.kind.is_given) {
    return Status::invalid(shown + "must have keeper=given to be told what tokens are worth, has " +
                           options.keeper);
  }
  if (!parts_.plan.keeps_tokens(layer)) {
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
  if (std::any_of(given.worth, given.worth + count, is_wrong) ||
      (given.decay != nullptr && std::any_of(given.decay, given.decay + count, is_wrong))) {
    return Status::invalid(shown + "must be told numbers, got NaN");
  }
  return Status::ok();
}

Status GivenWorths::give(int64_t layer, const GivenWorth& given) {
  const EngineOptions& options = parts_.options;
  KVSWAP_RETURN_IF_ERROR(check(layer, given));
  const int64_t positions = batch_.layer(layer).positions;
  const int64_t first = positions - given.tokens;
  for (int64_t part = 0; part < batch_.size(); ++part) {
    KeptTokens& kept = batch_.pages(part).kept(layer);
    if (static_cast<int64_t>(kept.mass.size()) < first) {
      return Status::invalid("give_worth: layer " + std::to_string(layer) +
                             " must be told of all tokens since its " +
                             std::to_string(kept.mass.size()) + "th, got those since its " +
                             std::to_string(first) + "th");
    }
    grow_mass(kept.mass, positions);
    grow_mass(kept.decay, positions);
    std::copy_n(given.worth + part * given.tokens, given.tokens, kept.mass.begin() + first);
    std::fill_n(kept.decay.begin() + first, given.tokens, 0.0f);
    if (given.decay != nullptr) {
      std::copy_n(given.decay + part * given.tokens, given.tokens, kept.decay.begin() + first);
    }
    const int64_t fresh = std::clamp<int64_t>(positions - kept.seen_positions, 0, given.tokens);
    kept.seen_positions = std::max(kept.seen_positions, positions);
    if (first < batch_.layer(layer).prefilled) {
      kept.note_chunk(first);
    } else {
      kept.count_queries(fresh, options.keep_interval);
    }
  }
  return Status::ok();
}

Status GivenWorths::check_given(int64_t layer, int64_t part) const {
  const KeptTokens& kept = batch_.pages(part).kept(layer);
  const int64_t sealed = batch_.layer(layer).sealed_groups * parts_.options.group_tokens;
  if (!parts_.keep.kind.is_given || static_cast<int64_t>(kept.mass.size()) >= sealed) {
    return Status::ok();
  }
  return Status::invalid("attend: layer " + std::to_string(layer) + " must be told what its " +
                         std::to_string(sealed) + " tokens on disk are worth, got " +
                         std::to_string(kept.mass.size()) +
                         "; call give_worth() after each append");
}

void GivenWorths::weigh(int64_t layer, int64_t part, std::vector<float>& mass) const {
  const KeptTokens& kept = batch_.pages(part).kept(layer);
  const int64_t positions = batch_.layer(layer).positions;
  const int64_t sealed = batch_.layer(layer).sealed_groups * parts_.options.group_tokens;
  mass.clear();
  grow_mass(mass, sealed);
  for (int64_t i = 0; i < sealed; ++i) {
    mass[i] = kept.mass[i] - static_cast<float>(positions - i) * kept.decay[i];
  }
}

}  // namespace kvswap
