#pragma once

#include <ATen/ATen.h>  // a program that includes this needs no other header of torch

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "kvswap/cache.h"
#include "kvswap/saved_cache.h"

namespace kvswap {

struct ExpandedQueries;  // torch/expanded_queries.h

/// What attention does to its scores beside scaling them: Gemma 2 caps them, gpt-oss has sinks.
struct ScoreTerms {
  double softcap = 0;               // score = softcap * tanh(score / softcap); 0: not capped
  std::optional<at::Tensor> sinks;  // [heads] fp32 on the cache's device, kept by the caller
};

/// What a layer's projection is estimated from.
struct EstimateFrom {
  int64_t layer = 0;
  at::Tensor keys;                  // [batch, kv_heads, tokens, head_dim]
  std::optional<at::Tensor> query;  // [batch, heads, tokens, head_dim] of the same tokens, or none
  std::optional<at::Tensor> valid;  // [batch, tokens] bool of the host; none: no token is padding
  int64_t rank = 0;
};
/// Returns the key and the query matrix, [kv_heads * head_dim, rank] fp32.
using Estimate = std::function<std::pair<at::Tensor, at::Tensor>(const EstimateFrom& from)>;

/// A Cache over tensors: checks them, hands over what they point to, and estimates projections
/// where none was calibrated. What needs no tensors is asked of cache().
///
/// A program calls, for a forward pass of `tokens` tokens and each layer i of it:
///
///   cache.begin_pass(Pass::kDecode);   // or kPrefill, once
///   cache.look_ahead(i + 1, tokens, predict);
///   output = cache.extend(i, query, keys, values, scale);
///
/// On a CUDA device calls queue work on torch's current stream there and on streams of their own,
/// as operations of torch do; tensors may come from and go to that stream at once.
///
/// Thread rules and order of calls: as Cache's, whose options get torch's threads, stream and
/// attention. A wrong call of these throws c10::ValueError; all else is as Cache's. No gradient is
/// recorded.
class TensorCache {
 public:
  explicit TensorCache(const CacheOptions& options);
  /// As prepare() says, with the projections it finds. Also throws ConfigError.
  explicit TensorCache(const OpenArgs& args);
  /// Goes on from a saved cache, as Cache does.
  TensorCache(const SavedCache& saved, const CacheOptions& options);

  /// Of the same tokens: crop(), reset(), report() and the like.
  Cache& cache() { return *cache_; }
  const Cache& cache() const { return *cache_; }

  /// In the place of the settings' projection_kind. The tokens' own call is not under way in it.
  void set_estimate(Estimate estimate) { estimate_ = std::move(estimate); }

  /// valid: [batch, tokens] bool of the positions that the next append() of each layer brings;
  /// none: no token is padding.
  void begin_pass(Pass pass, const std::optional<at::Tensor>& valid = {});
  /// valid: [batch, positions] bool of what is held; see kvswap::declare_held().
  void declare_held(const at::Tensor& valid);

  /// query: [batch, heads or kv_heads, queries, head_dim] after RoPE; with kv_heads heads it is the
  /// sum over each GQA group. scale, predicting_since_ns: as LookAheadTerms.
  void look_ahead(int64_t layer, const at::Tensor& query, std::optional<double> scale = {},
                  int64_t predicting_since_ns = 0);
  /// The same where Cache::wants_look_ahead() of so many tokens: `predict` returns the query. It is
  /// not called where any query will do, nor for a layer that is not there.
  void look_ahead(int64_t layer, int64_t tokens, const std::function<at::Tensor()>& predict,
                  std::optional<double> scale = {});

  /// scores: [batch, queries, groups] fp32 of the host; with heads=each [batch * kv_heads, ...].
  void give_scores(int64_t layer, const at::Tensor& scores);
  /// worth, decay: [batch, tokens] fp32 of the host; with heads=each [batch * kv_heads, tokens].
  void give_worth(int64_t layer, const at::Tensor& worth, const std::optional<at::Tensor>& decay,
                  TokenImportance::Of of = TokenImportance::Of::kNewest);

  /// keys: [batch, kv_heads, tokens, head_dim] after RoPE; values: as many, of the shape's
  /// value_width().
  void append(int64_t layer, const at::Tensor& keys, const at::Tensor& values);
  /// query: [batch, heads, tokens, head_dim] after RoPE, of the newest positions. Returns [batch,
  /// tokens, heads, value_width()].
  at::Tensor attend(int64_t layer, const at::Tensor& query, double scale,
                    const ScoreTerms& terms = {});
  /// The same, and what each token received of a decoding step: [batch, kv_heads, positions] fp32
  /// of the host. For a cache that tells_attention. After append(); estimates as extend() does.
  std::pair<at::Tensor, at::Tensor> attend_weighed(int64_t layer, const at::Tensor& query,
                                                   double scale, const ScoreTerms& terms = {});
  /// append() and attend() in one. A layer that is to choose from now on and has no projection gets
  /// one that is estimated: from a prefill's chunk, or from the newest tokens when decoding, or a
  /// few tokens of a prefill, have outgrown what may be attended.
  at::Tensor extend(int64_t layer, const at::Tensor& query, const at::Tensor& keys,
                    const at::Tensor& values, double scale, const ScoreTerms& terms = {});
  /// The same for a model with latent attention (sides = 1), of a prefill's chunk: attends by keys
  /// and values that are expanded block by block, without absorbed queries. Returns [batch, tokens,
  /// heads, value].
  at::Tensor extend_expanded(int64_t layer, const ExpandedQueries& queries, const at::Tensor& keys,
                             double scale, const ScoreTerms& terms = {});

  /// [kv_heads * head_dim, rank] each; with heads=each every KV head's own, one below the other.
  void set_projection(int64_t layer, const at::Tensor& key_projection,
                      const at::Tensor& query_projection);

  /// K and V of positions [begin, end), from disk and tail: [batch, kv_heads, n, head_dim] and
  /// [batch, kv_heads, n, value_width()].
  std::pair<at::Tensor, at::Tensor> read_back(int64_t layer, int64_t begin, int64_t end);

  /// Another one that goes on from here, with the same options. Records are shared.
  std::unique_ptr<TensorCache> fork();

 private:
  explicit TensorCache(std::unique_ptr<Cache> cache);
  void check(const char* where, const char* name, const at::Tensor& tensor, int64_t heads,
             int64_t width) const;
  void check_new(const char* where, const at::Tensor& keys, const at::Tensor& values) const;
  at::Tensor output_for(const at::Tensor& query) const;
  at::Tensor attend_into(int64_t layer, const at::Tensor& query, double scale,
                         const ScoreTerms& terms, std::span<float> received);
  void estimate(int64_t layer, int64_t begin, const at::Tensor& keys,
                const std::optional<at::Tensor>& query);
  void estimate_late(int64_t layer);
  void put_projection(int64_t layer, const at::Tensor& key_projection,
                      const at::Tensor& query_projection, ProjectionSource source);

  std::unique_ptr<Cache> cache_;
  Estimate estimate_;
  at::Device device_;  // of tensors
};

}  // namespace kvswap
