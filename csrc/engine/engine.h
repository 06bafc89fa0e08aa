#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/account.h"
#include "engine/appender.h"
#include "engine/audit.h"
#include "engine/batch.h"
#include "engine/calls.h"
#include "engine/clustering.h"
#include "engine/editor.h"
#include "engine/engine_parts.h"
#include "engine/exact_chunks.h"
#include "engine/given.h"
#include "engine/keeping.h"
#include "engine/layer_steps.h"
#include "engine/loader.h"
#include "engine/page_scores.h"
#include "engine/page_table.h"
#include "engine/past_reader.h"
#include "engine/saver.h"
#include "engine/sealer.h"
#include "engine/tail.h"

namespace kvswap {

struct AttendArgs {
  int64_t layer = 0;
  QueryView query;         // all heads
  void* output = nullptr;  // [batch, queries, heads, head_dim] contiguous
  float scale = 1.0f;
  float softcap = 0.0f;          // as PagedAttentionArgs
  const float* sinks = nullptr;  // [heads], where the pages are
};

/// One generation's KV cache on raw pointers: score -> select -> plan -> read -> attend.
///
/// The torch-free heart: checks who calls and in which order, and leaves the work to its parts.
/// csrc/kvswap/cache.h is its public face and documents the order of calls. Everything is
/// allocated when the batch is known and charged to the ledger before.
///
/// Callers' sequences and the parts' are the same, but where KV heads choose apart (heads=each):
/// then each KV head of a sequence is one of the parts' sequences, `heads_apart` of them a
/// caller's. Here the two meet: what is named `part` below counts the parts' sequences.
///
/// A Status that is_pending() (the disk hangs, or the call was asked to end) leaves everything as
/// it was, reads in flight included: the same call may be made again. The destructor waits for
/// them.
///
/// Thread rules: one thread at a time; kernels use the given ParallelFor.
class Engine {
 public:
  static Result<std::unique_ptr<Engine>> create(const EngineOptions& options, ParallelFor parallel);
  ~Engine();

  /// What the next calls belong to; until it is said, and after reset(), a prefill.
  Status begin_pass(Pass pass);
  /// Validity of the next positions: [batch, tokens], true where the token counts.
  Status declare(int64_t batch, int64_t tokens, const bool* valid);
  /// append() is all or nothing. A background write that failed is kept and tried again by the
  /// calls that need it; crop() and reset() drop what nobody will read.
  Status append(int64_t layer, const KeyValueView& tokens);
  /// Chooses, plans and submits what `layer` will need; see Cache::look_ahead(). On a device
  /// selection is asynchronous: the next call completes it, and attend() returns its errors.
  /// scale: what attend() will be given; none: 1 / sqrt(head_dim). Only a score by mass uses it.
  /// since_ns: when the prediction began, of the timeline's clock; 0: with the call.
  Status look_ahead(int64_t layer, const QueryView& query, std::optional<float> scale = {},
                    int64_t since_ns = 0);
  /// Attention of the last query.queries positions over sinks, chosen groups and tail, then seals
  /// what has left the tail. Of a decode pass, but for what ExactChunks takes.
  Status attend(const AttendArgs& args);

  /// Copies positions [begin, end) of one sequence to [kv_heads, end - begin, head_dim] arrays of
  /// the host.
  Status read_back(int64_t layer, int64_t sequence, int64_t begin, int64_t end, void* keys,
                   void* values);
  bool needs_projection(int64_t layer) const;
  Status set_projection(int64_t layer, int64_t rank, const float* keys, const float* queries);
  Status select_sequences(std::span<const int64_t> indices);
  Status crop(int64_t positions);
  Status reset();

  // What a step does not need, each with calls of its own.
  Saver& saver() { return saver_; }
  Loader& loader() { return loader_; }
  Given& given() { return given_; }
  ExactChunks& exact_chunks() { return exact_chunks_; }
  /// Who stays because of what was paid: asked, and given what it observes, by who attends exactly.
  Keeping& keeping() { return keeping_; }
  Patience& patience() { return parts_->patience; }

  const EngineParts& parts() const { return *parts_; }
  const EngineOptions& options() const { return options_; }  // as they were given
  const Audit& audit() const { return audit_; }
  int64_t batch() const { return batch_->size() / parts_->options.heads_apart; }
  int64_t positions(int64_t layer) const { return batch_->layer(layer).positions; }
  /// The parts' sequences: what their layers hold, and which of their positions count.
  const Batch& sequences() const { return *batch_; }
  /// [parts][groups]
  const std::vector<std::vector<int32_t>>& last_selection(int64_t layer);

 private:
  Engine(const EngineOptions& options, std::unique_ptr<EngineParts> parts);

  const EngineOptions options_;
  std::unique_ptr<EngineParts> parts_;
  Account account_;
  std::unique_ptr<Batch> batch_;
  Tail tail_;
  Sealer sealer_;
  std::unique_ptr<PastReader> past_;
  LayerSteps steps_;
  Calls calls_;
  Clustering clustering_;
  Appender appender_;
  Editor editor_;
  Saver saver_;
  Loader loader_;
  PageTable table_;
  Audit audit_;
  Keeping keeping_;
  ExactChunks exact_chunks_;
  Given given_;
  PageScores page_scores_;
};

}  // namespace kvswap
