#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvswap/budget.h"
#include "kvswap/model_shape.h"
#include "kvswap/projection_file.h"
#include "kvswap/settings.h"

namespace kvswap {

class ExactAttention;

/// Runs body(begin, end) over disjoint pieces of [0, count), possibly on several threads, and
/// returns when all are done. A piece is at least `grain` long except the last.
using Threads = std::function<void(int64_t count, int64_t grain,
                                   const std::function<void(int64_t begin, int64_t end)>& body)>;

/// What a cache is made of, when every decision is the program's own; see also prepare().
struct CacheOptions {
  ModelShape shape;
  Settings settings;           // projection_file is not used
  std::vector<int64_t> ranks;  // one per layer, or one for all; empty: the settings'
  /// On the disk to use; must exist; nothing is left behind in it. Empty, for rows=none and a
  /// keeper: what is neither sink, kept nor newest is gone for good, and no file is opened.
  std::string directory;
  /// Where pages, summaries and the program's arrays are: "cpu", or, in a program that links
  /// kvswap::torch, "cuda" or "cuda:1"; "host" is the device path over host memory, for tests.
  std::string device = "cpu";
  Budget budget;
  int64_t predictor_bytes = 0;  // taken by query predictors beside the budget; report() shows them
  int64_t timeline_spans = 0;   // of timeline(), 40 bytes each; 0: nothing is recorded
  /// With keeper=given: attend() may be asked what each token received, for which there is memory.
  bool tells_attention = false;
  /// Of a saved cache: its projections were calibrated, so that they stay when it is reset.
  bool is_calibrated = true;

  Threads threads = {};  // empty: the calling thread
  /// Asked about every 100 ms by a call that waits for the disk; true ends it. For Ctrl-C.
  std::function<bool()> shall_end = {};
  /// Asked by every call: the device's stream (a cudaStream_t) that the program's arrays are used
  /// on. Empty: its default stream.
  std::function<void*()> stream = {};
  /// How long chunks are attended; null: with the paged kernel, on the CPU. The caches of
  /// <kvswap/torch/...> bring torch's.
  std::shared_ptr<ExactAttention> exact = {};
};

/// Bytes by use, and their "total", that a batch and a context need with these options on a disk
/// of this alignment; "least" is the smallest kv_memory_bytes that holds its own total, since write
/// buffers grow with it. Opens nothing.
std::map<std::string, int64_t> memory_need(const CacheOptions& options, int64_t batch,
                                           int64_t context, int64_t alignment_bytes = 512);

/// What a cache is opened for, in the words of Python's KVSwapCache.
struct OpenArgs {
  ModelShape shape;
  std::string model_type;  // such as "qwen3"; empty: not compared with the config's
  std::string directory;   // on the disk to use; empty: as CacheOptions'
  std::string device = "cpu";
  std::string config_path;  // of a config file; empty: the defaults
  Budget budget;
  std::optional<FirstPass> first;  // where max_context and max_batch are not promised
  int64_t predictor_bytes = 0;  // of kv_memory_bytes, taken by predictors where settings look ahead
  Threads threads;
  int64_t timeline_spans = 0;  // as CacheOptions'
};

/// What a program's words come to: settings as Python's KVSwapCache would have them, projections.
struct Opening {
  CacheOptions options;
  std::vector<Projection> projections;  // one per layer, of options.ranks; empty: none calibrated
};

/// Reads the config and its projection, checks both against the model, fits the settings to the
/// budget. Without a calibrated projection the ranks are doubled. Throws ConfigError and, when the
/// budget is too small, SessionError naming the minimum.
Opening prepare(const OpenArgs& args);

}  // namespace kvswap
