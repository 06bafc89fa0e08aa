#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
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

/// Bytes by use, their sum as "total", and as "least" the smallest budget that would hold its own
/// total, that settings need for a batch and a context; never less for more rank, groups or pages.
using Need = std::function<std::map<std::string, int64_t>(const Settings& settings, int64_t batch,
                                                          int64_t context)>;

/// The rank of each layer on disk: the settings', twice that when no projection was calibrated;
/// never more than the keys are wide.
std::vector<int64_t> effective_ranks(const Settings& settings, const ModelShape& shape,
                                     bool calibrated);

/// What must fit.
struct Request {
  int64_t kv_memory_bytes = 0;
  int64_t context = 0;  // tokens per sequence
  int64_t batch = 0;
};

/// What a budget may change.
struct Lowering {
  /// Where more than a quarter of the groups would be missing, two layers may have pages at a time
  /// (Settings::resident_layers) if that keeps a quarter more: every step reads them all.
  bool may_share = false;
  /// Groups and pages alone are lowered: columns belong to what a method is.
  bool keeps_columns = false;
};

/// The settings with rank, groups and pages that fit: from the smallest usable ones upwards, first
/// rank and groups together up to the given ones, then pages up to the given `pages_max`. A rank
/// for each layer keeps its proportions. Throws SessionError (kBudget) when even the smallest do
/// not fit; it names the minimum and what to lower.
Settings fit_budget(const Request& request, const ModelShape& shape, const Settings& settings,
                    const Need& need, const Lowering& how = {});

/// The settings with as many pages for reuse, up to their own, as fit a budget; fewer change no
/// answer. Where the fewest leave room for `ready_for` tokens, that stays. Throws as fit_budget().
Settings fit_pages(const Request& request, const Settings& settings, const Need& need,
                   int64_t ready_for);

/// The settings that make the most of a budget, where nobody has calibrated or asked for any.
///
/// Where the whole context fits it is kept, and attention is exact. Otherwise columns, their
/// precision and groups are chosen together, by what they are worth: of every number of columns
/// with the most groups that then fit, up to the given ones, the pair that misses least. Columns
/// come first: 8 of them find a tenth of what is asked for with 100 groups, and 32 find nine tenths
/// with 8. int4 rows have more of them in the same bytes. Where much is missed all the same, two
/// layers have pages at a time (Settings::resident_layers): several times as many groups for the
/// same bytes, which every step reads again. What is left over keeps more pages. The rank chosen is
/// half the columns, since it is doubled without a calibration. Throws as fit_budget().
///
/// on_device: pages are a device's, which has no kernels for int4 rows: they are not chosen, nor
/// are pages shared, which is measured on none.
/// rank_max: no more, as of projections that are there.
Settings spend_budget(const Request& request, const ModelShape& shape, const Settings& settings,
                      const Need& need, bool on_device = false,
                      std::optional<int64_t> rank_max = {});

/// That a budget does not cover the smallest settings: what does, and what to lower. `need` is
/// as Need says.
std::string too_small(const Request& request, const std::map<std::string, int64_t>& need,
                      const Settings& smallest);

/// What a choice costs: nats of divergence from the full cache's next token, by columns of the
/// summary, in rising order, and by tokens attended. The two nearly add.
struct MissedByColumns {
  int64_t columns;
  double missed;
};
/// Of rows of one precision.
struct MissedByRows {
  const char* summary_dtype;
  std::span<const MissedByColumns> by_columns;
};
/// Of what spend_budget() chooses from, the precision that is preferred first.
std::span<const MissedByRows> missed_by_rows(bool on_device = false);
double missed_by_tokens(int64_t tokens, int64_t context);

/// How many times as many tokens a step attends, where nobody has said how many, as of a short
/// context: twice as many of more than 6,144. With 400 of 7,936 even a choice by the attention
/// itself misses what 200 of 4,096 do (docs/choosing.md).
int64_t length_factor(int64_t context);

/// The settings for a run: what Python's KVSwapCache settles on for the same words.
///
/// A config's table gives the solution for the nearest (batch, context); a budget then lowers what
/// does not fit or, when there is no config (null), uses what there is. With neither batch and
/// context nor a first pass, only what no run could do without is checked. Throws ConfigError, and
/// SessionError (kBudget) naming the minimum when even the smallest settings do not fit.
/// on_device: as in spend_budget().
Settings settle(const SwapConfig* config, const ModelShape& shape, const Budget& budget,
                const Need& need, const FirstPass* first = nullptr, bool on_device = false);

}  // namespace kvswap
