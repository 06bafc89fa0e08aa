#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvswap/cache_options.h"
#include "kvswap/cache_report.h"
#include "kvswap/errors.h"
#include "kvswap/pass.h"
#include "kvswap/tokens.h"

namespace kvswap {

class SavedCache;
struct SaveArgs;

/// What a cache holds.
struct Held {
  int64_t batch = 0;  // 0 before the first append
  /// Of every layer; -1 where they differ, since a pass has reached some of them only, and where a
  /// crop() is unfinished.
  int64_t positions = 0;
};

/// What a layer holds, and what it must be given.
struct LayerState {
  int64_t positions = 0;
  bool attends_exactly = false;   // the pass attends all that is there, past tail and pages too
  bool attends_all = true;        // no group has to be left out: any query chooses all
  bool needs_projection = false;  // it must choose among more groups than it may attend, and cannot
  bool needs_scores = false;      // GroupScores must come before attend() of so many queries
};

/// Whether a layer is worth a look ahead.
enum class LookAhead {
  kNo,
  kAnyQuery,   // all of it is attended, so that nothing must be predicted
  kPredicted,  // a predicted query prefetches, or with look_ahead=trust chooses
};

/// Whether a layer that is to choose must be given a projection that is estimated.
enum class EstimateWanted {
  kNo,          // it has one, or none is of use to it
  kFromChunk,   // from a prefill's chunk, before it is appended: then nothing must be read back
  kIfOutgrown,  // after append(), if LayerState::needs_projection: from what is there
};

/// How look_ahead() may choose.
struct LookAheadTerms {
  /// What attend() will be given, for a score by mass; none: 1 / sqrt(head_dim).
  std::optional<float> scale = {};
  /// Since when the query has been predicted, of the steady clock, for the timeline; 0: not said.
  int64_t predicting_since_ns = 0;
};

/// One generation's KV cache on disk, on raw pointers and without torch; over tensors see
/// <kvswap/torch/tensor_cache.h>.
///
/// Order of calls in one forward pass of n new tokens, for each layer i in turn:
///   begin_pass(pass)     once, before the first layer; with NewPositions where some are padding
///   look_ahead(i + 1, predicted query)   any time before layer i + 1's attend(); optional
///   append(i, tokens)    the new tokens' K and V
///   attend(i, query, scale, output)
/// or the last two in one, extend(i, ...).
/// What a pass is the program says, see Pass: a prefill attends exactly, a decoding step, of at
/// most select_queries_max tokens, selects. The last piece of a prompt is a prefill however short
/// it is. Until begin_pass(), and after reset(), a pass is a prefill; what is said holds until the
/// next begin_pass(). With records=fp8 those of a prefill's own tokens that an append() has sealed
/// before attend() are rounded, too.
///
/// A layer that must choose among more groups than groups_max needs a projection first: a
/// calibrated one, which OpenArgs bring, or one that the program estimates where wants_estimate().
///
/// On a device pointers are the device's, and calls queue work on CacheOptions::stream and on
/// streams of their own: what they read may be freed, and what they write used, by work that is
/// queued on that stream later. The host waits for chosen ids and for the disk.
///
/// Thread rules: one thread at a time; a call while another one runs throws SessionError (kBusy).
/// close() is called by any thread: it makes the running call end at its next wait for the disk,
/// and waits for it. Not valid in a forked child. Every method but close() throws
/// std::invalid_argument for a wrong call and SessionError for what the world or a limit refuses.
/// After an error the same call may be made again, when its cause is gone; crop() to the positions
/// before a forward pass takes back what its layers have appended, unless a crop() is unfinished.
class Cache {
 public:
  explicit Cache(const CacheOptions& options);
  /// As prepare() says, with the projections it finds. Also throws ConfigError.
  explicit Cache(const OpenArgs& args);
  explicit Cache(const Opening& opening);
  /// Goes on from a saved cache. `options`: saved.options(), perhaps with other promises, on
  /// another device, with another reader and threads. Reads no record, of clusters those of its
  /// reuse buffer.
  Cache(const SavedCache& saved, const CacheOptions& options);
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  /// A forward pass begins; `positions`: those that the next append() of each layer brings.
  void begin_pass(Pass pass, const NewPositions& positions = {});

  /// Whether a look ahead could be of use to `layer` in a forward pass of `tokens` tokens that has
  /// not reached it. kNo in a prefill, and for a layer that is not there, so that i + 1 may be
  /// asked for the last; also for one whose predictions have cost more time than they saved, which
  /// tries again now and then.
  LookAhead wants_look_ahead(int64_t layer, int64_t tokens) const;
  /// Predicts what `layer` will read from a predicted query, and submits the reads; where the layer
  /// before is to choose first, with its own query, behind the reads of that one. With
  /// look_ahead=verify the query given to attend() chooses all the same, and what it lacks is read
  /// then: the selection is as without any prediction. A prefetch that fails is dropped, and
  /// counted. Does nothing when nothing has to be read, or in a prefill. Where any query will do
  /// its data may be null. A score by mass needs all heads.
  void look_ahead(int64_t layer, const Queries& query, const LookAheadTerms& terms = {});

  // What a program decides in the place of the settings' method.
  void give(int64_t layer, const GroupScores& scores);
  void give(int64_t layer, const TokenImportance& worth);
  void give(int64_t layer, const GroupChoice& choice);

  /// The first call fixes the batch. Fails before anything is written when budget, quota or disk
  /// cannot hold it.
  void append(int64_t layer, const NewTokens& tokens);
  /// softmax(scale * Q K^T) V of the newest query.tokens positions, into output: [batch, tokens,
  /// heads, value_width()] contiguous, of the cache's dtype. Rows of padding mean nothing. A
  /// prefill takes memory in the order of its own K, V and output on top of the ledger's. received:
  /// [batch, kv_heads, positions] out, of a cache that tells_attention: what of a decoding step's
  /// attention each token received, the mean over queries and a KV head's query heads; 0: it was
  /// not attended. Empty: not wanted.
  void attend(int64_t layer, const Queries& query, float scale, void* output,
              const CapAndSinks& terms = {}, std::span<float> received = {});
  /// append() and attend() in one; on a device a prefill is written while its attention is
  /// computed. When it throws, nothing of a prefill is kept; of a decoding step the tokens may be.
  void extend(int64_t layer, const NewTokens& tokens, const Queries& query, float scale,
              void* output, const CapAndSinks& terms = {});

  /// Must a projection be estimated for `layer`, since so many tokens are about to be appended?
  EstimateWanted wants_estimate(int64_t layer, int64_t tokens) const;
  /// The pair of projections of a layer; groups that are sealed already are read back for it. With
  /// heads=each every KV head has its own rows of it. One that was estimated is wanted anew after
  /// reset(), and once crop() has taken back what it was estimated from.
  void set_projection(int64_t layer, const Projection& projection,
                      ProjectionSource source = ProjectionSource::kGiven);

  /// Copies K and V of positions [begin, end) of one sequence, from disk and tail, to arrays
  /// [kv_heads, end - begin, head_dim] and [.., value_width()] of the cache's dtype, on the host.
  void read_back(int64_t layer, int64_t sequence, int64_t begin, int64_t end, void* keys,
                 void* values);

  /// The groups that the last attend() chose, with look_ahead=trust the last look_ahead(),
  /// [batch][...] in rising order; with heads=each [batch * kv_heads][...]. With grouping=clusters,
  /// where not everything fits, pages of clusters: negative numbers, see
  /// methods/cluster_selector.h.
  std::vector<std::vector<int64_t>> last_selection(int64_t layer) const;

  /// Sequence i goes on as sequence indices[i]: beam reorder, select, repeat. Nothing is rewritten.
  void select_sequences(std::span<const int64_t> indices);
  /// Keeps the first `positions` positions of every layer. All or nothing, with one exception: what
  /// returns to the tail is read twice, and where the second reading fails or is ended the crop is
  /// unfinished. Then crop() to as many positions or fewer ends it, reset() forgets it, and every
  /// call that computes, saves or changes anything throws SessionError (kStorage).
  void crop(int64_t positions);
  /// Forgets everything but projections and settings.
  void reset();

  /// Writes the folder that args names, complete or not at all, for SavedCache::open(). The cache
  /// goes on; where its file became the folder's, new records go to another one.
  void save(const SaveArgs& args);
  /// Another cache that goes on from here, with the same options. Records are shared.
  std::unique_ptr<Cache> fork();
  /// Goes on with another division of memory, as of a text that is longer than was thought: of
  /// `options` rank and ranks, summary_dtype, groups_max, pages_max, resident_layers and the
  /// budget's bytes are taken. No rank rises where a layer has a projection, whose part of the new
  /// rank stays. Summaries are made again from all records, with no memory for both divisions:
  /// counters and timeline begin anew. When it throws, the division is as it was. Where reading
  /// fails then too, every call begins with another attempt, and throws its error.
  void divide(const CacheOptions& options);

  /// Gives back file and memory; further calls throw. Idempotent, never throws.
  void close() noexcept;

  /// needs_scores: of so many queries.
  LayerState layer(int64_t layer, int64_t queries = 1) const;
  Held held() const;
  /// Are some of positions [begin, end), appended or declared, padding? Then valid, if it is not
  /// null, is [batch, end - begin], true where the position counts.
  bool has_padding(int64_t begin, int64_t end, bool* valid = nullptr) const;

  const CacheOptions& options() const;
  Report report() const;
  /// What the newest timeline_spans stretches of time were spent on: trace events in JSON, for
  /// Perfetto or chrome://tracing. Of the calling thread: predict, select, plan, submit, wait,
  /// land, attend, append, seal and, between them, the program's own; of the disk: reads and
  /// writes.
  std::string timeline() const;

 private:
  friend void declare_held(Cache& cache, const HeldPositions& held);
  friend void give_tokens(Cache& cache, int64_t layer, const TokenChoice& choice);

  class Impl;
  explicit Cache(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Which of the positions that a cache holds count from now on, before begin_pass(): an answer that
/// ended before others of its batch has padding behind it. What came as padding must stay so; what
/// became it here counts again if a later call says so, as after a pass that is taken back. Such a
/// position is attended no more. Sinks stay where they are, and summaries as they were.
void declare_held(Cache& cache, const HeldPositions& held);

/// What the layer's next attend() sees, of a cache with rows=given; see TokenChoice. GroupScores
/// say which groups are read.
void give_tokens(Cache& cache, int64_t layer, const TokenChoice& choice);

}  // namespace kvswap
