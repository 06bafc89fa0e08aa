#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvswap/core_session.h"

namespace kvswap {

class Session;  // <kvswap/torch/session.h>
struct ScoreTerms;

/// A session over tensors with the settings it was opened with.
///
/// What Python's KVSwapCache does around a session: whether a layer is to look ahead, a projection
/// from the prompt where none was calibrated. A program calls, for each layer i of a forward pass:
///
///   if (cache.wants_look_ahead(i + 1, tokens)) cache.look_ahead(i + 1, tokens, predict);
///   output = cache.attend(i, query, keys, values, scale);
///
/// Thread rules, and what is thrown: as Session's; the constructor also throws ConfigError.
class DiskCache {
 public:
  /// Opens what prepare() says for these words; args.threads is torch's own pool.
  explicit DiskCache(const OpenArgs& args);
  ~DiskCache();
  DiskCache(const DiskCache&) = delete;
  DiskCache& operator=(const DiskCache&) = delete;

  /// Whether a prediction for `layer` could be of use to a forward pass of `tokens` tokens. False
  /// for a layer that is not there, so that i + 1 may be asked for the last layer too.
  bool wants_look_ahead(int64_t layer, int64_t tokens) const;

  /// Begins to read what `layer` will need. `predict` returns [batch, heads or kv_heads, tokens,
  /// head_dim] after RoPE; it is not called where all groups are attended anyway. scale: as
  /// Session's.
  void look_ahead(int64_t layer, int64_t tokens, const std::function<at::Tensor()>& predict,
                  std::optional<double> scale = {});

  /// Stores the new keys and values, [batch, kv_heads, tokens, head_dim] after RoPE, and attends:
  /// query [batch, heads, tokens, head_dim], returns [batch, tokens, heads, head_dim]. With
  /// ScoreTerms scores are capped, or have sinks beside them.
  at::Tensor attend(int64_t layer, const at::Tensor& query, const at::Tensor& keys,
                    const at::Tensor& values, double scale);
  at::Tensor attend(int64_t layer, const at::Tensor& query, const at::Tensor& keys,
                    const at::Tensor& values, double scale, const ScoreTerms& terms);

  /// Columns that every layer holds.
  int64_t columns() const;
  const Settings& settings() const { return options_.settings; }
  /// The session itself, for crop(), reset(), select_sequences() and the like.
  Session& session() { return *session_; }
  const Session& session() const { return *session_; }
  /// What Python's CacheStats prints: a name and a value a line.
  std::string report() const;

 private:
  at::Tensor any_query(int64_t tokens) const;
  bool will_choose(int64_t layer, int64_t tokens) const;
  void estimate(int64_t layer, const at::Tensor& keys, const std::optional<at::Tensor>& query);

  CoreOptions options_;
  bool is_calibrated_;
  std::vector<bool> is_estimated_;  // [layers]
  int64_t predictor_bytes_ = 0;
  std::unique_ptr<Session> session_;
};

}  // namespace kvswap
