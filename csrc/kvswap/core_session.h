#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvswap/budget.h"
#include "kvswap/errors.h"
#include "kvswap/model_shape.h"
#include "kvswap/projection_file.h"
#include "kvswap/settings.h"

namespace kvswap {

/// Runs body(begin, end) over disjoint pieces of [0, count), possibly on several threads, and
/// returns when all are done. A piece is at least `grain` long except the last.
using Threads = std::function<void(int64_t count, int64_t grain,
                                   const std::function<void(int64_t begin, int64_t end)>& body)>;

/// What a session is made of, when every decision is the program's own; see also open_core().
struct CoreOptions {
  ModelShape shape;
  Settings settings;           // projection_file, projection_kind and look_ahead are not used
  std::vector<int64_t> ranks;  // one per layer, or one for all; empty: the settings'
  /// On the disk to use; must exist; nothing is left behind in it. Empty, for rows=none and a
  /// keeper: what is neither sink, kept nor newest is gone for good, and no file is opened.
  std::string directory;
  std::string device = "cpu";  // where pages, summaries and tensors are: see find_device()
  Budget budget;
  Threads threads;             // empty: the calling thread
  int64_t timeline_spans = 0;  // of timeline(), 40 bytes each; 0: nothing is recorded
};

/// K and V of new tokens, each [batch, kv_heads, tokens, head_dim] of the session's dtype with
/// head_dim contiguous. Strides are in elements.
struct NewTokens {
  const void* keys = nullptr;  // after RoPE
  const void* values = nullptr;
  int64_t batch = 1;
  int64_t tokens = 0;
  int64_t key_batch_stride = 0;
  int64_t key_head_stride = 0;
  int64_t key_token_stride = 0;
  int64_t value_batch_stride = 0;
  int64_t value_head_stride = 0;
  int64_t value_token_stride = 0;

  /// Contiguous arrays.
  static NewTokens packed(const void* keys, const void* values, const ModelShape& shape,
                          int64_t batch, int64_t tokens);
};

/// Queries of a layer, [batch, heads, tokens, head_dim] of the session's dtype, after RoPE, with
/// head_dim contiguous. Strides are in elements.
struct Queries {
  const void* data = nullptr;
  int64_t heads = 0;  // look_ahead() also takes kv_heads: the sum over each KV head's query heads
  int64_t tokens = 0;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;

  /// A contiguous array.
  static Queries packed(const void* data, int64_t heads, int64_t tokens, int64_t head_dim);
};

/// What attention does to its scores beside scaling them: Gemma 2 caps them, gpt-oss has sinks.
struct CapAndSinks {
  float softcap = 0;             // score = softcap * tanh(score / softcap); 0: not capped
  const float* sinks = nullptr;  // [heads], a score each beside the tokens', without a value
};

class SavedCache;
struct SaveArgs;

/// One generation's KV cache on disk, on raw pointers and without torch.
///
/// Order of calls in one forward pass of n new tokens, for each layer i in turn:
///   declare(...)         once, before the first layer, when some new columns are padding
///   look_ahead(i + 1, predicted query)   any time before layer i + 1's attend(); optional
///   append(i, tokens)    the new tokens' K and V
///   attend(i, query, scale, output)
/// Up to select_queries_max tokens attend over sinks, selected groups and tail; a longer chunk
/// attends exactly over everything before it, which is streamed from disk. With records=fp8 those
/// of its own tokens that the append has sealed are rounded, too.
///
/// A layer that must choose among more groups than groups_max needs a projection first.
///
/// Thread rules: one thread at a time; a call while another one runs throws SessionError (kBusy).
/// close() is called by any thread: it makes the running call end at its next wait for the disk,
/// and waits for it. Not valid in a forked child. Every method but close() throws
/// std::invalid_argument for a wrong call and SessionError for what the world or a limit refuses.
/// After an error the same call may be made again, when its cause is gone; crop() to the columns
/// before a forward pass takes back what its layers have appended.
class CoreSession {
 public:
  explicit CoreSession(const CoreOptions& options);
  /// Goes on from a saved session. `options`: saved.options(), perhaps with other promises, reader
  /// and threads. Reads no record.
  CoreSession(const SavedCache& saved, const CoreOptions& options);
  ~CoreSession();
  CoreSession(const CoreSession&) = delete;
  CoreSession& operator=(const CoreSession&) = delete;

  /// Bytes by use, and their "total", that a batch and a context need with these options on a disk
  /// of this alignment. Opens nothing.
  static std::map<std::string, int64_t> memory_need(const CoreOptions& options, int64_t batch,
                                                    int64_t context, int64_t alignment_bytes = 512);

  /// Validity of the columns that the next append() of each layer brings: [batch, tokens], true
  /// where the token counts. Without it new columns are all valid.
  void declare(int64_t batch, int64_t tokens, const bool* valid);

  /// Predicts what `layer` will read from a predicted query, and submits the reads. Does nothing
  /// when nothing has to be read or when there are more than select_queries_max queries. A score by
  /// mass needs all heads and the scale that attend() will be given; none: 1 / sqrt(head_dim).
  void look_ahead(int64_t layer, const Queries& query, std::optional<float> scale = {});

  /// With rows=given: what the layer's sealed groups are worth to its next look_ahead() or
  /// attend(), [batch, queries, groups]; with heads=each [batch * kv_heads, queries, groups]. The
  /// best are attended, the lower number first among equals; -inf: never.
  void give_scores(int64_t layer, std::span<const float> scores, int64_t queries);
  /// True where give_scores() must come before attend() of so many queries.
  bool needs_scores(int64_t layer, int64_t queries) const;

  /// With keeper=given, after each append(): what the layer's newest tokens are worth to be kept,
  /// [batch, tokens], and what they lose of it with each later token (as worth, or empty); with
  /// heads=each [batch * kv_heads, tokens]. The best stay, the earlier one first among equals;
  /// -inf: never.
  void give_worth(int64_t layer, std::span<const float> worth, std::span<const float> decay = {});

  /// The first call fixes the batch. Fails before anything is written when budget, quota or disk
  /// cannot hold it.
  void append(int64_t layer, const NewTokens& tokens);

  /// softmax(scale * Q K^T) V of the newest query.tokens columns, into output: [batch, tokens,
  /// heads, head_dim] contiguous, of the session's dtype. Rows of padding mean nothing. A long
  /// chunk takes memory in the order of its own K, V and output on top of the ledger's.
  void attend(int64_t layer, const Queries& query, float scale, void* output,
              const CapAndSinks& terms = {});

  /// The pair of projections of a layer; groups that are sealed already are read back for it. With
  /// heads=each every KV head has its own rows of it.
  void set_projection(int64_t layer, const Projection& projection);
  /// True when this layer must choose among more groups than it may attend and has no projection.
  bool needs_projection(int64_t layer) const;

  /// Copies K and V of columns [begin, end) of one sequence, from disk and tail, to arrays
  /// [kv_heads, end - begin, head_dim] of the session's dtype.
  void read_back(int64_t layer, int64_t sequence, int64_t begin, int64_t end, void* keys,
                 void* values);

  /// The groups that the last look_ahead() or attend() chose, [batch][...] in rising order; with
  /// heads=each [batch * kv_heads][...].
  std::vector<std::vector<int64_t>> last_selection(int64_t layer) const;

  /// Sequence i goes on as sequence indices[i]: beam reorder, select, repeat.
  void select_sequences(std::span<const int64_t> indices);
  /// Keeps the first `columns` columns of every layer.
  void crop(int64_t columns);
  /// Forgets everything but projections and settings.
  void reset();

  /// Writes the folder that args names, complete or not at all, for SavedCache::open(). The session
  /// goes on; where its file became the folder's, new records go to another one.
  void save(const SaveArgs& args);
  /// Another session that goes on from here, with the same options. Records are shared.
  std::unique_ptr<CoreSession> fork();

  /// Gives back file and memory; further calls throw. Idempotent, never throws.
  void close() noexcept;

  int64_t columns(int64_t layer) const;
  int64_t batch() const;  // 0 before the first append

  const CoreOptions& options() const;
  /// Numbers by name (bytes, seconds, counts): the same names as Session's.
  std::map<std::string, double> counters() const;
  /// Sentences by name: reader, io_mode, simd, fallbacks (one a line; empty: none).
  std::map<std::string, std::string> facts() const;
  /// Bytes by use, as charged against the budget, with total, peak and limit.
  std::map<std::string, int64_t> ledger() const;
  /// What the newest timeline_spans stretches of time were spent on: trace events in JSON, for
  /// Perfetto or chrome://tracing. Of the calling thread: select, plan, submit, wait, land, attend,
  /// append, seal and, between them, the program's own; of the disk: reads and writes.
  std::string timeline() const;

 private:
  class Impl;
  explicit CoreSession(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// What a session is opened for, in the words of Python's KVSwapCache.
struct OpenArgs {
  ModelShape shape;
  std::string model_type;  // such as "qwen3"; empty: not compared with the config's
  std::string directory;   // on the disk to use; empty: as CoreOptions'
  std::string device = "cpu";
  std::string config_path;  // of a config file; empty: the defaults
  Budget budget;
  std::optional<FirstPass> first;  // where max_context and max_batch are not promised
  int64_t predictor_bytes = 0;  // of kv_memory_bytes, taken by predictors where settings look ahead
  Threads threads;
  int64_t timeline_spans = 0;  // as CoreOptions'
};

/// What a program's words come to: settings as Python's KVSwapCache would have them, projections.
struct Opening {
  CoreOptions options;
  std::vector<Projection> projections;  // one per layer, of options.ranks; empty: none calibrated
};

/// Reads the config and its projection, checks both against the model, fits the settings to the
/// budget. Without a calibrated projection the ranks are doubled. Throws ConfigError and, when the
/// budget is too small, SessionError naming the minimum.
Opening prepare(const OpenArgs& args);

/// A session opened by `prepare`, projections set.
std::unique_ptr<CoreSession> open_core(const OpenArgs& args);

}  // namespace kvswap
