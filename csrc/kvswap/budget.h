#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kvswap/model_shape.h"
#include "kvswap/swap_config.h"

namespace kvswap {

/// What a program promises and asks for; nothing: not said.
struct Budget {
  std::optional<int64_t> kv_memory_bytes;  // hard limit of what a session keeps in memory
  std::optional<int64_t> max_context;      // tokens per sequence to be ready for
  std::optional<int64_t> max_batch;        // sequences to be ready for

  bool is_known() const { return max_context && max_batch; }
};

/// The first forward pass, where that is what is known of batch and context.
struct FirstPass {
  int64_t batch = 0;
  int64_t tokens = 0;

  /// What to be ready for: half as long again, at least 1,024 tokens more.
  int64_t context() const;
};

/// Bytes by use, and their sum as "total", that settings need for a batch and a context; never less
/// for more rank, groups or pages.
using Need = std::function<std::map<std::string, int64_t>(const Settings& settings, int64_t batch,
                                                          int64_t context)>;

/// The rank of each layer on disk: the settings', twice that when no projection was calibrated;
/// never more than the keys are wide.
std::vector<int64_t> effective_ranks(const Settings& settings, const ModelShape& shape,
                                     bool calibrated);

/// The settings for a run: what Python's KVSwapCache settles on for the same words.
///
/// A config's table gives the solution for the nearest (batch, context); a budget then lowers what
/// does not fit or, when there is no config (null), uses what there is. With neither batch and
/// context nor a first pass, only what no run could do without is checked. Throws ConfigError, and
/// SessionError (kBudget) naming the minimum when even the smallest settings do not fit.
Settings settle(const SwapConfig* config, const ModelShape& shape, const Budget& budget,
                const Need& need, const FirstPass* first = nullptr);

}  // namespace kvswap
