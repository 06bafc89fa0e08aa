#include "methods/summary/user_scored_encoder.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace kvswap {

Status UserScoredEncoder::give(int64_t layer, const UserScores& scores) {
  const int64_t count = scores.sequences * scores.queries * scores.groups;
  const float* end = scores.scores + count;
  const float* wrong = std::find_if(scores.scores, end, [](float s) { return std::isnan(s); });
  if (wrong != end) {
    const int64_t at = wrong - scores.scores;
    return Status::invalid("give_scores: scores must be numbers, got NaN in layer " +
                           std::to_string(layer) + " for group " +
                           std::to_string(at % scores.groups) + " of sequence " +
                           std::to_string(at / scores.groups / scores.queries));
  }
  given_[layer] = {scores.sequences, scores.queries, scores.groups, {scores.scores, end}};
  return Status::ok();
}

bool UserScoredEncoder::holds(int64_t layer, const UserScores& wanted) const {
  const UserOverrides& given = given_[layer];
  return given.sequences == wanted.sequences && given.queries == wanted.queries &&
         given.groups == wanted.groups;
}

void UserScoredEncoder::take(int64_t layer, std::span<float> scores) {
  UserOverrides& given = given_[layer];
  KVSWAP_ASSERT(given.scores.size() == scores.size());
  std::copy(given.scores.begin(), given.scores.end(), scores.begin());
  given = {};
}

}  // namespace kvswap
