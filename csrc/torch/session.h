#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvswap/core_session.h"
#include "kvswap/saved_cache.h"

namespace kvswap {

class Engine;

/// What attention does to its scores beside scaling them: Gemma 2 caps them, gpt-oss has sinks.
struct ScoreTerms {
  double softcap = 0;               // score = softcap * tanh(score / softcap); 0: not capped
  std::optional<at::Tensor> sinks;  // [heads] fp32 on the session's device, kept by the caller
};

/// One generation's KV cache on disk: the public C++ class, and what Python's cache drives.
///
/// Order of calls in one forward pass of `n` new tokens, for each layer i in turn:
///   declare(valid)                 once, before the first layer, when some new columns are padding
///   look_ahead(i + 1, query)       any time before layer i + 1's attend(); optional
///   append(i, keys, values)        the new tokens' K (after RoPE) and V
///   attend(i, query, ...)          softmax(scale * Q K^T) V over selected groups, sinks and tail
/// or both in one, extend(i, ...).
/// A chunk of more than select_queries_max tokens attends exactly over everything before it.
///
/// On a CUDA device calls queue work on torch's current stream there and on streams of their own,
/// as operations of torch do; tensors may come from and go to that stream at once. The host waits
/// for chosen ids and for the disk.
///
/// Thread rules: one thread at a time; a call while another one runs throws SessionError (kBusy).
/// close() is called by any thread: it makes the running call end at its next wait for the disk,
/// and waits for it. Not valid in a forked child. Every method but close() throws c10::ValueError
/// for a wrong call and kvswap::SessionError for what the world refuses.
///
/// After an error the same call may be made again, when its cause is gone; crop() to the columns
/// before a forward pass takes back what its layers have appended.
class Session {
 public:
  explicit Session(const CoreOptions& options);
  /// Goes on from a saved session. `options`: saved.options(), perhaps with other promises and on
  /// another device. Reads no record.
  Session(const SavedCache& saved, const CoreOptions& options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  /// Bytes by use (and their "total") that a batch and a context need with these settings, on a
  /// disk of this alignment. Opens nothing.
  static std::map<std::string, int64_t> memory_need(const CoreOptions& options, int64_t batch,
                                                    int64_t context, int64_t alignment_bytes = 512);

  /// Validity of the columns that the next append() of each layer brings: [batch, tokens] bool.
  /// Without it new columns are all valid.
  void declare(const at::Tensor& valid);

  /// Predicts what `layer` will read from a predicted query, and submits the reads.
  /// query: [batch, heads or kv_heads, queries, head_dim] after RoPE; with kv_heads heads it is the
  /// sum over each GQA group. Does nothing when no group is sealed, when all of them are attended
  /// anyway and in memory, or when queries > select_queries_max. A score by mass needs all heads
  /// and the scale that attend() will be given; none: 1 / sqrt(head_dim).
  void look_ahead(int64_t layer, const at::Tensor& query, std::optional<double> scale = {});

  /// Replaces the next choice of `layer` by these groups, [batch][...]: for oracles, recorded
  /// choices and measurements. The choice is made all the same, so that its cost stays; groups that
  /// are not sealed or attended anyway (sinks) are left out. At most pages_max a sequence. With
  /// heads=each a KV head has its own, [batch * kv_heads][...].
  void override_selection(int64_t layer, const std::vector<std::vector<int64_t>>& groups);

  /// With rows=given: what the layer's sealed groups are worth to its next look_ahead() or
  /// attend(), [batch, queries, groups] fp32 of the host; with heads=each [batch * kv_heads,
  /// queries, groups]. The best are attended, the lower number first among equals; -inf: never.
  void give_scores(int64_t layer, const at::Tensor& scores);
  /// True where give_scores() must come before attend() of so many queries.
  bool needs_scores(int64_t layer, int64_t queries) const;

  /// With keeper=given, after each append(): what the layer's newest tokens are worth to be kept,
  /// [batch, tokens] fp32 of the host, and what they lose of it with each later token (or nothing);
  /// with heads=each [batch * kv_heads, tokens]. The best stay, the earlier one first among equals;
  /// -inf: never.
  void give_worth(int64_t layer, const at::Tensor& worth, const std::optional<at::Tensor>& decay);

  /// keys, values: [batch, kv_heads, tokens, head_dim], last dimension contiguous. The first call
  /// fixes the batch. Fails before anything is written when budget, quota or disk cannot hold it.
  void append(int64_t layer, const at::Tensor& keys, const at::Tensor& values);

  /// query: [batch, heads, tokens, head_dim]; keys, values: what the last append() of this layer
  /// was given (used by exact chunks). Returns [batch, tokens, heads, head_dim].
  at::Tensor attend(int64_t layer, const at::Tensor& query, const at::Tensor& keys,
                    const at::Tensor& values, double scale, const ScoreTerms& terms = {});

  /// append() and attend() in one call; on a device a long chunk is written while its attention is
  /// computed. When it throws, nothing of the chunk is kept.
  at::Tensor extend(int64_t layer, const at::Tensor& query, const at::Tensor& keys,
                    const at::Tensor& values, double scale, const ScoreTerms& terms = {});

  /// The pair of projections of a layer, [kv_heads * head_dim, rank] fp32 (with heads=each every KV
  /// head's own, one below the other); groups sealed before are read back and summarised.
  void set_projection(int64_t layer, const at::Tensor& key_projection,
                      const at::Tensor& query_projection);
  /// True when this layer must choose among more groups than it may attend and has no projection.
  bool needs_projection(int64_t layer) const;
  /// True while no group of the layer has to be left out: any query chooses all.
  bool attends_all(int64_t layer) const;

  /// K and V of columns [begin, end), from disk and tail: ([batch, kv_heads, n, head_dim]) x 2.
  std::pair<at::Tensor, at::Tensor> read_back(int64_t layer, int64_t begin, int64_t end);

  /// The groups that the last look_ahead() or attend() chose, [batch][...] in rising order; with
  /// heads=each [batch * kv_heads][...].
  std::vector<std::vector<int64_t>> last_selection(int64_t layer) const;

  /// Sequence i of the new batch continues as sequence indices[i] of the old one: beam reorder,
  /// select, repeat. Nothing is rewritten on disk.
  void select_sequences(const std::vector<int64_t>& indices);
  /// Keeps the first `columns` columns of every layer.
  void crop(int64_t columns);
  /// Forgets everything but projections and settings.
  void reset();

  /// Writes the folder that args names, complete or not at all, for SavedCache::open(). The session
  /// goes on; where its file became the folder's, new records go to another one.
  void save(const SaveArgs& args);
  /// Another session that goes on from here, with the same options. Records are shared.
  std::unique_ptr<Session> fork();

  /// Gives back file and memory; further calls throw. Idempotent, never throws.
  void close() noexcept;

  /// Asked about every 100 ms by a call that waits for the disk; true ends it. For Ctrl-C.
  void set_question(std::function<bool()> shall_end);

  int64_t columns(int64_t layer) const;
  /// Of every layer; -1 where they differ, after a pass that has reached some of them only.
  int64_t common_columns() const;
  int64_t batch() const;  // 0 before the first append

  /// Numbers by name (bytes, seconds, counts); README.md documents each.
  std::map<std::string, double> counters() const;
  /// Sentences by name: reader, io_mode, fallbacks, ...
  std::map<std::string, std::string> facts() const;
  /// Bytes by use, as charged against kv_memory_bytes.
  std::map<std::string, int64_t> ledger() const;

  /// What the newest timeline_spans stretches of time were spent on: trace events in JSON, for
  /// Perfetto or chrome://tracing. Of the calling thread: predict, select, plan, submit, wait,
  /// land, attend, append, seal and, between them, the model; of the disk: reads and writes.
  std::string timeline() const;
  /// Records that a query for `layer` was predicted from `began_ns` of the steady clock until now;
  /// nothing without a timeline.
  void record_predict(int64_t layer, int64_t began_ns);

 private:
  class Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  static at::Tensor attend_now(Engine& engine, int64_t layer, const at::Tensor& query,
                               const at::Tensor& keys, const at::Tensor& values, double scale,
                               const ScoreTerms& terms);

  std::unique_ptr<Impl> impl_;
};

}  // namespace kvswap
