#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "engine/engine_options.h"

namespace kvswap {

/// New tokens of a layer: keys [batch, kv_heads, tokens, head_dim] and values of value_width(),
/// contiguous.
struct Tokens {
  int64_t tokens = 0;
  std::vector<float> keys;
  std::vector<float> values;
};

/// What an engine was given, all of it in memory, and what it may be judged by: attention in double
/// over whatever it says that it attended, and the best groups to choose by low-rank products.
///
/// It decides nothing: when groups are sealed and when a choice is made it is told. (What is
/// decided is specified by tests/python/reference_session.py.) Keys, queries and projections should
/// be small whole numbers, so that scores are exact and equal scores really are. A part is a
/// sequence, or with heads=each one of its KV heads, in order.
class PlainMemory {
 public:
  explicit PlainMemory(const EngineOptions& options) : options_(options), layers_(options.layers) {}

  struct Sequence {
    std::vector<float> keys;    // [positions, kv_heads, head_dim]
    std::vector<float> values;  // of value_width()
  };
  struct Layer {
    int64_t positions = 0;
    int64_t rounded = 0;  // groups whose records are known to be so, where these are rounded
    std::vector<Sequence> sequences;
    std::vector<float> key_projection;  // [kv_heads * head_dim, rank]
    std::vector<float> query_projection;
    std::vector<std::vector<float>> asked;  // by look-aheads since the last attention
  };

  Layer& layer(int64_t index) { return layers_[index]; }
  const std::vector<std::vector<bool>>& validity() const { return valid_; }
  int64_t batch() const { return static_cast<int64_t>(valid_.size()); }
  int64_t parts() const { return batch() * heads_apart(); }
  int64_t heads_apart() const { return options_.heads == "each" ? options_.kv_heads : 1; }
  int64_t width() const { return options_.kv_heads * options_.head_dim; }
  int64_t value_dim() const { return options_.record_shape().value_width(); }

  void declare(int64_t batch, int64_t tokens, const bool* valid) {
    if (valid_.empty()) start(batch);
    for (int64_t b = 0; b < batch; ++b) {
      valid_[b].insert(valid_[b].end(), valid + b * tokens, valid + (b + 1) * tokens);
    }
  }

  void append(int64_t index, int64_t batch, const Tokens& tokens) {
    if (valid_.empty()) start(batch);
    Layer& layer = layers_[index];
    const int64_t dim = options_.head_dim;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t t = 0; t < tokens.tokens; ++t) {
        for (int64_t h = 0; h < options_.kv_heads; ++h) {
          const int64_t row = (b * options_.kv_heads + h) * tokens.tokens + t;
          const float* key = &tokens.keys[row * dim];
          const float* value = &tokens.values[row * value_dim()];
          Sequence& into = layer.sequences[b];
          into.keys.insert(into.keys.end(), key, key + dim);
          into.values.insert(into.values.end(), value, value + value_dim());
        }
      }
    }
    layer.positions += tokens.tokens;
    for (auto& valid : valid_) {
      if (static_cast<int64_t>(valid.size()) < layer.positions) valid.resize(layer.positions, true);
    }
  }

  void crop(int64_t positions) {
    for (Layer& layer : layers_) {
      layer.asked.clear();
      if (layer.positions <= positions) continue;
      layer.positions = positions;
      layer.rounded = std::min(layer.rounded, options_.sealed_groups(positions));
      for (Sequence& sequence : layer.sequences) {
        sequence.keys.resize(positions * width());
        sequence.values.resize(positions * options_.kv_heads * value_dim());
      }
    }
    for (auto& valid : valid_) valid.resize(std::min<size_t>(valid.size(), positions));
  }

  void select_sequences(const std::vector<int64_t>& indices) {
    const auto valid = std::exchange(valid_, {});
    for (const int64_t index : indices) valid_.push_back(valid[index]);
    for (Layer& layer : layers_) {
      const auto sequences = std::exchange(layer.sequences, {});
      for (const int64_t index : indices) layer.sequences.push_back(sequences[index]);
      layer.asked.clear();
    }
  }

  void reset() {
    valid_.clear();
    for (Layer& layer : layers_) {
      layer.positions = layer.rounded = 0;
      layer.sequences.clear();
      layer.asked.clear();
    }
  }

  /// Attention of the newest `queries` positions, [batch, queries, heads, value_dim()], of the
  /// valid tokens that is_seen(sequence, part, token) tells. query [batch, heads, queries,
  /// head_dim].
  using IsSeen = std::function<bool(int64_t b, int64_t part, int64_t token)>;
  std::vector<double> attend_over(int64_t index, const std::vector<float>& query, int64_t queries,
                                  double scale, const IsSeen& is_seen) const {
    const Layer& layer = layers_[index];
    std::vector<double> output;
    for (int64_t b = 0; b < batch(); ++b) {
      for (int64_t q = 0; q < queries; ++q) {
        for (int64_t h = 0; h < options_.query_heads; ++h) {
          attend_one(layer, b, h, layer.positions - queries + q,
                     &query[((b * options_.query_heads + h) * queries + q) * options_.head_dim],
                     scale, is_seen, output);
        }
      }
    }
    return output;
  }

  bool is_sink(int64_t b, int64_t group) const {
    const int64_t first = first_valid(b);
    return options_.sink_tokens > 0 && first < static_cast<int64_t>(valid_[b].size()) &&
           group >= first / options_.group_tokens &&
           group <= (first + options_.sink_tokens - 1) / options_.group_tokens;
  }

  /// The groups a part attends for `queries` queries when `sealed` are on disk: all if they fit,
  /// else each query's best; ties to the lower group.
  std::vector<int32_t> best(int64_t index, int64_t part, int64_t sealed,
                            const std::vector<float>& query, int64_t queries) const {
    const std::vector<int32_t> groups = choosable(part / heads_apart(), sealed);
    if (fits(part / heads_apart(), sealed)) return groups;
    const int64_t most = std::min(options_.groups_max, options_.pages_max / queries);
    std::set<int32_t> chosen;
    for (int64_t q = 0; q < queries; ++q) {
      const std::vector<double> asked = weights(index, part, query, queries, q);
      std::vector<std::pair<double, int32_t>> scored;
      for (const int32_t group : groups)
        scored.push_back({-score(index, part, group, asked), group});
      std::sort(scored.begin(), scored.end());
      for (int64_t i = 0; i < std::min<int64_t>(most, scored.size()); ++i) {
        chosen.insert(scored[i].second);
      }
    }
    return {chosen.begin(), chosen.end()};
  }

 private:
  void start(int64_t batch) {
    valid_.assign(batch, {});
    for (Layer& layer : layers_) layer.sequences.assign(batch, {});
  }

  int64_t first_valid(int64_t b) const {
    return std::find(valid_[b].begin(), valid_[b].end(), true) - valid_[b].begin();
  }

  std::vector<int32_t> choosable(int64_t b, int64_t sealed) const {
    std::vector<int32_t> groups;
    for (int64_t g = 0; g < sealed; ++g) {
      const auto begin = valid_[b].begin() + g * options_.group_tokens;
      const auto end = begin + options_.group_tokens;
      if (!is_sink(b, g) && std::find(begin, end, true) != end) {
        groups.push_back(static_cast<int32_t>(g));
      }
    }
    return groups;
  }

  bool fits(int64_t b, int64_t sealed) const {
    int64_t groups = 0;
    for (int64_t g = first_valid(b) / options_.group_tokens; g < sealed; ++g) {
      groups += !is_sink(b, g);
    }
    return groups <= options_.groups_max;
  }

  /// What each element of a key is worth to a query, K_lr = K A_k and Q_lr = Q A_q: [width], 0 for
  /// heads of other parts.
  std::vector<double> weights(int64_t index, int64_t part, const std::vector<float>& query,
                              int64_t queries, int64_t q) const {
    const Layer& layer = layers_[index];
    const int64_t rank = options_.ranks[index], dim = options_.head_dim;
    const int64_t b = part / heads_apart(), ratio = options_.query_heads / options_.kv_heads;
    const auto is_of = [&](int64_t kv_head) {
      return heads_apart() == 1 || part % heads_apart() == kv_head;
    };
    std::vector<double> projected(rank), importance(width());
    for (int64_t h = 0; h < options_.query_heads; ++h) {
      for (int64_t i = 0; is_of(h / ratio) && i < dim * rank; ++i) {
        projected[i % rank] +=
            query[((b * options_.query_heads + h) * queries + q) * dim + i / rank] *
            layer.query_projection[h / ratio * dim * rank + i];
      }
    }
    for (int64_t i = 0; i < width() * rank; ++i) {
      if (is_of(i / rank / dim))
        importance[i / rank] += layer.key_projection[i] * projected[i % rank];
    }
    return importance;
  }

  double score(int64_t index, int64_t part, int64_t group,
               const std::vector<double>& importance) const {
    const int64_t b = part / heads_apart();
    const std::vector<float>& keys = layers_[index].sequences[b].keys;
    double best = -INFINITY;
    for (int64_t t = group * options_.group_tokens; t < (group + 1) * options_.group_tokens; ++t) {
      double sum = 0;
      for (int64_t w = 0; w < width(); ++w) sum += keys[t * width() + w] * importance[w];
      if (valid_[b][t]) best = std::max(best, sum);
    }
    return best;
  }

  void attend_one(const Layer& layer, int64_t b, int64_t head, int64_t position, const float* query,
                  double scale, const IsSeen& is_seen, std::vector<double>& output) const {
    const int64_t dim = options_.head_dim;
    const int64_t kv_head = head / (options_.query_heads / options_.kv_heads);
    const int64_t part = b * heads_apart() + kv_head % heads_apart();
    std::vector<double> sum(value_dim());
    double total = 0;
    double largest = -INFINITY;
    for (const bool is_second : {false, true}) {
      for (int64_t t = 0; t <= position; ++t) {
        if (!valid_[b][t] || !is_seen(b, part, t)) continue;
        double score = 0;
        const int64_t at = t * width() + kv_head * dim;
        for (int64_t d = 0; d < dim; ++d) score += query[d] * layer.sequences[b].keys[at + d];
        if (!is_second) largest = std::max(largest, score * scale);
        const double weight = is_second ? std::exp(score * scale - largest) : 0;
        total += weight;
        const int64_t value_at = (t * options_.kv_heads + kv_head) * value_dim();
        for (int64_t d = 0; d < value_dim(); ++d) {
          sum[d] += weight * layer.sequences[b].values[value_at + d];
        }
      }
    }
    for (const double value : sum) output.push_back(total > 0 ? value / total : 0);
  }

  EngineOptions options_;
  std::vector<Layer> layers_;
  std::vector<std::vector<bool>> valid_;  // [batch][positions]
};

}  // namespace kvswap
