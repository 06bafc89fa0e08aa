#include "methods/retention/key_outliers.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "methods/summary/group_encoder.h"

namespace kvswap {
namespace {

constexpr float kLeastNorm = 1e-8f;  // as torch.nn.functional.cosine_similarity

/// body(channel, key) for each number of the token's key.
template <typename T, typename Body>
void for_each_number(const GroupKeys& group, const T* keys, int64_t token, const Body& body) {
  for (int64_t head = 0; head < group.kv_heads; ++head) {
    const T* key = keys + head * group.keys.head_stride + token * group.keys.token_stride;
    for (int64_t i = 0; i < group.head_dim; ++i) body(head * group.head_dim + i, to_float(key[i]));
  }
}

template <typename T>
float outlier_score_of_keys(const GroupKeys& group, const T* keys) {
  std::vector<float> mean(group.kv_heads * group.head_dim, 0.0f);
  float count = 0;
  for (int64_t token = 0; token < group.tokens; ++token) {
    if ((group.valid >> token & 1) == 0) continue;
    count += 1;
    for_each_number(group, keys, token, [&](int64_t i, float number) { mean[i] += number; });
  }
  if (count == 0) return 0;
  float square = 0;
  for (float& number : mean) {
    number /= count;
    square += number * number;
  }
  float least = 1;
  for (int64_t token = 0; token < group.tokens; ++token) {
    if ((group.valid >> token & 1) == 0) continue;
    float product = 0;
    float own = 0;
    for_each_number(group, keys, token, [&](int64_t i, float number) {
      product += mean[i] * number;
      own += number * number;
    });
    least = std::min(least, product / std::max(std::sqrt(square * own), kLeastNorm));
  }
  return 1 - least;
}

}  // namespace

float key_outlier_score(const GroupKeys& group) {
  float importance = 0;
  with_elements(group.keys.data, group.keys.dtype,
                [&](const auto* keys) { importance = outlier_score_of_keys(group, keys); });
  return importance;
}

}  // namespace kvswap
