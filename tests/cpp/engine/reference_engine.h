#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <set>
#include <vector>

#include "engine/engine_options.h"
#include "kernels/cpu/element.h"

namespace kvswap {

/// New tokens of a layer: keys, values [batch, kv_heads, tokens, head_dim], contiguous.
struct Tokens {
  int64_t tokens = 0;
  std::vector<float> keys;
  std::vector<float> values;
};

/// The engine as it would be with all K and V in memory and no thought of speed: the same rules of
/// sealing (with records=fp8 what is sealed, and no sink, is rounded), sinks and selection,
/// attention in double. Keys, queries and projections should be small whole numbers, so that scores
/// are exact and equal scores really are.
///
/// Choices are of parts: sequences, or with heads=each the KV heads of them, in order.
class ReferenceEngine {
 public:
  explicit ReferenceEngine(const EngineOptions& options)
      : options_(options), layers_(options.layers) {}

  struct Sequence {
    std::vector<float> keys;  // [columns, kv_heads, head_dim]
    std::vector<float> values;
  };
  struct Layer {
    int64_t columns = 0;
    int64_t sealed = 0;
    std::vector<Sequence> sequences;
    std::vector<float> key_projection;  // [kv_heads * head_dim, rank]
    std::vector<float> query_projection;
    bool is_planned = false;
    int64_t planned_columns = 0;
    int64_t planned_sealed = 0;
    std::vector<std::vector<int32_t>> chosen;  // [parts][groups]
  };

  Layer& layer(int64_t index) { return layers_[index]; }
  const std::vector<std::vector<bool>>& validity() const { return valid_; }
  int64_t batch() const { return static_cast<int64_t>(valid_.size()); }

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
          const int64_t at = ((b * options_.kv_heads + h) * tokens.tokens + t) * dim;
          Sequence& into = layer.sequences[b];
          into.keys.insert(into.keys.end(), &tokens.keys[at], &tokens.keys[at] + dim);
          into.values.insert(into.values.end(), &tokens.values[at], &tokens.values[at] + dim);
        }
      }
    }
    if (tokens.tokens <= options_.select_queries_max) seal(layer);
    layer.columns += tokens.tokens;
    for (auto& valid : valid_) {
      if (static_cast<int64_t>(valid.size()) < layer.columns) valid.resize(layer.columns, true);
    }
    if (tokens.tokens > options_.select_queries_max) seal(layer);
  }

  /// query [batch, heads, queries, head_dim], contiguous.
  void look_ahead(int64_t index, const std::vector<float>& query, int64_t queries) {
    Layer& layer = layers_[index];
    layer.is_planned = false;
    if (layer.sealed == 0 || queries > options_.select_queries_max || lacks_projection(layer)) {
      return;
    }
    plan(layer, index, query, queries);
  }

  /// [batch, queries, heads, head_dim]
  std::vector<double> attend(int64_t index, const std::vector<float>& query, int64_t queries,
                             double scale) {
    Layer& layer = layers_[index];
    if (!layer.is_planned || layer.planned_sealed != layer.sealed ||
        layer.planned_columns + queries != layer.columns) {
      plan(layer, index, query, queries);
    }
    layer.is_planned = false;
    return attend_over(index, query, queries, scale, [&](int64_t b, int64_t part, int64_t token) {
      const auto group = static_cast<int32_t>(token / options_.group_tokens);
      const std::vector<int32_t>& chosen = layer.chosen[part];
      return group >= layer.sealed || is_sink(b, group) ||
             std::binary_search(chosen.begin(), chosen.end(), group);
    });
  }

  /// The same over the tokens that is_seen(sequence, part, token) tells, of those that are valid.
  using IsSeen = std::function<bool(int64_t b, int64_t part, int64_t token)>;
  std::vector<double> attend_over(int64_t index, const std::vector<float>& query, int64_t queries,
                                  double scale, const IsSeen& is_seen) {
    Layer& layer = layers_[index];
    std::vector<double> output;
    for (int64_t b = 0; b < batch(); ++b) {
      for (int64_t q = 0; q < queries; ++q) {
        for (int64_t h = 0; h < options_.query_heads; ++h) {
          attend_one(layer, b, h, layer.columns - queries + q,
                     &query[((b * options_.query_heads + h) * queries + q) * options_.head_dim],
                     scale, is_seen, output);
        }
      }
    }
    seal(layer);
    return output;
  }

  void crop(int64_t columns) {
    for (Layer& layer : layers_) {
      if (layer.columns > columns) {
        layer.columns = columns;
        layer.sealed = std::min(layer.sealed, options_.sealed_groups(columns));
        for (Sequence& sequence : layer.sequences) {
          sequence.keys.resize(columns * width());
          sequence.values.resize(columns * width());
        }
      }
      layer.is_planned = false;
    }
    for (auto& valid : valid_) valid.resize(std::min<size_t>(valid.size(), columns));
  }

  void select_sequences(const std::vector<int64_t>& indices) {
    for (Layer& layer : layers_) seal(layer);
    const auto valid = valid_;
    valid_.clear();
    for (const int64_t index : indices) valid_.push_back(valid[index]);
    for (Layer& layer : layers_) {
      const auto sequences = layer.sequences;
      layer.sequences.clear();
      for (const int64_t index : indices) layer.sequences.push_back(sequences[index]);
      layer.is_planned = false;
    }
  }

  /// What has left the tail is sealed by the next short append(), also by one that is refused.
  void seal_overflow(int64_t index) { seal(layers_[index]); }

  bool is_sink(int64_t b, int64_t group) const {
    const int64_t first = first_valid(b);
    return options_.sink_tokens > 0 && first < static_cast<int64_t>(valid_[b].size()) &&
           group >= first / options_.group_tokens &&
           group <= (first + options_.sink_tokens - 1) / options_.group_tokens;
  }

  void reset() {
    valid_.clear();
    for (Layer& layer : layers_) {
      layer.columns = layer.sealed = 0;
      layer.sequences.clear();
      layer.is_planned = false;
    }
  }

 private:
  int64_t width() const { return options_.kv_heads * options_.head_dim; }
  int64_t heads_apart() const { return options_.heads == "each" ? options_.kv_heads : 1; }
  /// Does a KV head belong to the part?
  bool is_of(int64_t part, int64_t kv_head) const {
    return heads_apart() == 1 || part % heads_apart() == kv_head;
  }

  void start(int64_t batch) {
    valid_.assign(batch, {});
    for (Layer& layer : layers_) layer.sequences.assign(batch, {});
  }

  void seal(Layer& layer) {
    const int64_t before = layer.sealed;
    layer.sealed = std::max(layer.sealed, options_.sealed_groups(layer.columns));
    for (int64_t g = before; options_.has_float8_records() && g < layer.sealed; ++g) {
      for (int64_t b = 0; b < batch(); ++b) {
        if (is_sink(b, g)) continue;
        for (int64_t h = 0; h < options_.kv_heads; ++h) {
          round(layer.sequences[b].keys, g, h);
          round(layer.sequences[b].values, g, h);
        }
      }
    }
  }

  /// To e4m3 times the least power of two with which all are at most 448.
  void round(std::vector<float>& side, int64_t group, int64_t head) const {
    std::vector<float*> of_head;
    for (int64_t t = group * options_.group_tokens; t < (group + 1) * options_.group_tokens; ++t) {
      for (int64_t d = 0; d < options_.head_dim; ++d) {
        of_head.push_back(&side[t * width() + head * options_.head_dim + d]);
      }
    }
    float largest = 0;
    for (const float* value : of_head) largest = std::max(largest, std::fabs(*value));
    float power = 0x1p-117f;
    while (largest > 448 * power) power *= 2;
    for (float* value : of_head) *value = to_float(from_float<Float8>(*value / power)) * power;
  }

  int64_t first_valid(int64_t b) const {
    return std::find(valid_[b].begin(), valid_[b].end(), true) - valid_[b].begin();
  }

  bool has_valid(int64_t b, int64_t group) const {
    const auto begin = valid_[b].begin() + group * options_.group_tokens;
    return std::find(begin, begin + options_.group_tokens, true) != begin + options_.group_tokens;
  }

  bool fits(const Layer& layer, int64_t b) const {
    int64_t groups = 0;
    for (int64_t g = first_valid(b) / options_.group_tokens; g < layer.sealed; ++g) {
      groups += !is_sink(b, g);
    }
    return groups <= options_.groups_max;
  }

  bool lacks_projection(const Layer& layer) const {
    for (int64_t b = 0; b < batch(); ++b) {
      if (layer.key_projection.empty() && !fits(layer, b)) return true;
    }
    return false;
  }

  void plan(Layer& layer, int64_t index, const std::vector<float>& query, int64_t queries) {
    layer.is_planned = true;
    layer.planned_columns = layer.columns;
    layer.planned_sealed = layer.sealed;
    layer.chosen.assign(batch() * heads_apart(), {});
    const int64_t k = std::min(options_.groups_max, options_.pages_max / queries);
    for (int64_t part = 0; part < batch() * heads_apart(); ++part) {
      const int64_t b = part / heads_apart();
      std::set<int32_t> chosen;
      if (fits(layer, b)) {
        for (int64_t g = 0; g < layer.sealed; ++g) {
          if (!is_sink(b, g) && has_valid(b, g)) chosen.insert(static_cast<int32_t>(g));
        }
      } else {
        for (int64_t q = 0; q < queries; ++q) {
          for (const int32_t g : best(layer, index, part, query, queries, q, k)) chosen.insert(g);
        }
      }
      layer.chosen[part].assign(chosen.begin(), chosen.end());
    }
  }

  /// The k groups whose best valid token has the highest low-rank score; ties to the lower group.
  std::vector<int32_t> best(const Layer& layer, int64_t index, int64_t part,
                            const std::vector<float>& query, int64_t queries, int64_t q,
                            int64_t k) const {
    const int64_t b = part / heads_apart();
    const int64_t rank = options_.ranks[index];
    const int64_t ratio = options_.query_heads / options_.kv_heads;
    std::vector<double> projected(rank);
    for (int64_t h = 0; h < options_.query_heads; ++h) {
      for (int64_t d = 0; is_of(part, h / ratio) && d < options_.head_dim; ++d) {
        const double value =
            query[((b * options_.query_heads + h) * queries + q) * options_.head_dim + d];
        const int64_t row = h / ratio * options_.head_dim + d;
        for (int64_t r = 0; r < rank; ++r) {
          projected[r] += value * layer.query_projection[row * rank + r];
        }
      }
    }
    std::vector<std::pair<double, int32_t>> scored;
    for (int64_t g = 0; g < layer.sealed; ++g) {
      double score = -INFINITY;
      for (int64_t t = g * options_.group_tokens; t < (g + 1) * options_.group_tokens; ++t) {
        if (valid_[b][t]) score = std::max(score, token_score(layer, part, t, rank, projected));
      }
      if (score > -INFINITY && !is_sink(b, g)) scored.push_back({-score, static_cast<int32_t>(g)});
    }
    std::sort(scored.begin(), scored.end());
    std::vector<int32_t> groups;
    for (int64_t i = 0; i < std::min<int64_t>(k, scored.size()); ++i) {
      groups.push_back(scored[i].second);
    }
    return groups;
  }

  double token_score(const Layer& layer, int64_t part, int64_t token, int64_t rank,
                     const std::vector<double>& projected) const {
    const Sequence& sequence = layer.sequences[part / heads_apart()];
    double score = 0;
    for (int64_t r = 0; r < rank; ++r) {
      double key = 0;
      for (int64_t w = 0; w < width(); ++w) {
        if (!is_of(part, w / options_.head_dim)) continue;
        key += sequence.keys[token * width() + w] * layer.key_projection[w * rank + r];
      }
      score += key * projected[r];
    }
    return score;
  }

  void attend_one(const Layer& layer, int64_t b, int64_t head, int64_t column, const float* query,
                  double scale, const IsSeen& is_seen, std::vector<double>& output) const {
    const int64_t dim = options_.head_dim;
    const int64_t kv_head = head / (options_.query_heads / options_.kv_heads);
    const int64_t offset = kv_head * dim;
    const int64_t part = b * heads_apart() + kv_head % heads_apart();
    std::vector<double> sum(dim);
    double total = 0;
    double largest = -INFINITY;
    for (const bool is_second : {false, true}) {
      for (int64_t t = 0; t <= column; ++t) {
        if (!valid_[b][t] || !is_seen(b, part, t)) continue;
        double score = 0;
        const int64_t at = t * width() + offset;
        for (int64_t d = 0; d < dim; ++d) score += query[d] * layer.sequences[b].keys[at + d];
        if (!is_second) largest = std::max(largest, score * scale);
        const double weight = is_second ? std::exp(score * scale - largest) : 0;
        total += weight;
        for (int64_t d = 0; d < dim; ++d) sum[d] += weight * layer.sequences[b].values[at + d];
      }
    }
    for (const double value : sum) output.push_back(total > 0 ? value / total : 0);
  }

  EngineOptions options_;
  std::vector<Layer> layers_;
  std::vector<std::vector<bool>> valid_;  // [batch][columns]
};

}  // namespace kvswap
