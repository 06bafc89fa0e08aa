#include "kvswap/budget.h"

#include <algorithm>
#include <limits>

#include "engine/plan.h"
#include "kvswap/errors.h"
#include "kvswap/memory_size.h"
#include "methods/retention/retention_policy.h"
#include "methods/summary/summary_encoder.h"

namespace kvswap {
namespace {

constexpr int64_t kRankMin = 8;    // below it choices are hardly better than chance
constexpr int64_t kGroupsMin = 8;  // fewer are not chosen for a budget
constexpr int64_t kSteps = 64;
// While one layer attends, the next reads what it attended last, or is known to choose, into the
// other's pages: there is no use for the pages of a third.
constexpr int64_t kLayersSharing = 2;
constexpr int64_t kGroupsMost = 1 << 20;  // Settings::groups_max
constexpr double kReuseWorth = 0.02;      // nats: three quarters of what is read; docs/choosing.md

using Uses = std::map<std::string, int64_t>;

/// The largest n in 0..most for which `holds`; it holds for 0 and for all below one it holds.
template <typename Holds>
int64_t largest(int64_t most, const Holds& holds) {
  int64_t low = 0;
  int64_t high = most;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (holds(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// Tokens that are retained where a budget leaves so many groups. With a policy that retains a
/// share of the attended tokens the share stays: the same tokens in addition to fewer groups would
/// be another method, and their memory is missing where groups are selected.
int64_t retained_tokens_with(const Settings& settings, int64_t groups) {
  const RetentionKind& kind = *RetentionKind::find(settings.keeper);
  const bool is_share =
      settings.rows != "none" && kind.keeps_tokens && kind.scored_by == ScoredBy::kAttention;
  if (!is_share || groups >= settings.groups_max) return settings.keep_tokens;
  const int64_t least = std::min(settings.group_tokens, settings.keep_tokens);
  return std::max(least, settings.keep_tokens * groups / settings.groups_max);
}

/// `step` / 64 of the way from the smallest usable settings to the given ones; no spare pages.
Settings between(const Settings& settings, const ModelShape& shape, bool keeps_columns,
                 int64_t step) {
  const auto part = [&](int64_t low, int64_t high) {
    return high <= low ? high : low + (high - low) * step / kSteps;
  };
  Settings chosen = settings;
  if (!keeps_columns && SummaryKind::find(settings.rows)->takes_projections) {
    const int64_t width = row_width(settings, shape.kv_heads, shape.head_dim);
    const int64_t rank_min = std::min(kRankMin, width);
    std::vector<int64_t> ranks = ranks_of(settings, shape.layers);
    const int64_t together = settings.projection_kind == "rope_pairs" ? 2 : 1;
    for (int64_t& rank : ranks) {
      rank = part(rank_min, std::min(rank, width));
      rank -= rank % together;
    }
    if (std::holds_alternative<int64_t>(settings.rank)) {
      chosen.rank = ranks[0];
    } else {
      chosen.rank = std::move(ranks);
    }
  }
  chosen.groups_max = part(kGroupsMin, settings.groups_max);
  chosen.keep_tokens = retained_tokens_with(settings, chosen.groups_max);
  // Each query of a short chunk must find a page at least.
  chosen.pages_max = std::max(chosen.groups_max, settings.select_queries_max);
  return chosen;
}

template <typename Fits>
Settings with_spare_pages(const Settings& settings, int64_t pages_max, const Fits& fits) {
  const auto wider = [&](int64_t more) {
    Settings chosen = settings;
    chosen.pages_max += more;
    return chosen;
  };
  const int64_t spare = std::max<int64_t>(0, pages_max - settings.pages_max);
  return wider(largest(spare, [&](int64_t more) { return fits(wider(more)); }));
}

// Measured on a model of 135M parameters with keys of 192 elements, at 3,900 tokens, scored by
// mass, projections from the prompt; docs/choosing.md has it all. 20, 28 and 40 columns are read
// off the line between, int4's off int8's line at nine tenths of the columns, which find as much.
constexpr MissedByColumns kMissedByInt8Columns[] = {{8, 0.45},  {12, 0.40}, {16, 0.32}, {20, 0.20},
                                                    {24, 0.10}, {28, 0.06}, {32, 0.03}, {40, 0.02},
                                                    {48, 0.01}, {64, 0.00}};
constexpr MissedByColumns kMissedByInt4Columns[] = {{8, 0.46},  {12, 0.42}, {16, 0.35}, {20, 0.27},
                                                    {24, 0.17}, {28, 0.10}, {32, 0.06}, {40, 0.03},
                                                    {48, 0.02}, {56, 0.01}, {64, 0.00}};
constexpr MissedByRows kMissedByRows[] = {{"int8", kMissedByInt8Columns},
                                          {"int4", kMissedByInt4Columns}};
struct MissedByTokens {
  int64_t tokens;
  double missed;
};
constexpr MissedByTokens kMissedByTokens[] = {
    {32, 0.21}, {64, 0.15}, {128, 0.085}, {256, 0.035}, {400, 0.01}};
constexpr int64_t kLongContext = 6144;

std::string shown(const Rank& rank) {
  if (const auto* one = std::get_if<int64_t>(&rank)) return std::to_string(*one);
  const auto& each = std::get<std::vector<int64_t>>(rank);
  std::string text;
  for (const int64_t one : each) text += (text.empty() ? "" : ", ") + std::to_string(one);
  return "(" + text + (each.size() == 1 ? ",)" : ")");
}

std::string both(int64_t bytes) {
  return std::to_string(bytes) + " (" + format_bytes(static_cast<double>(bytes)) + ")";
}

}  // namespace

std::span<const MissedByRows> missed_by_rows(bool on_device) {
  return std::span(kMissedByRows).first(on_device ? 1 : std::size(kMissedByRows));
}

int64_t length_factor(int64_t context) { return context > kLongContext ? 2 : 1; }

/// Between the measured numbers a straight line, beyond them the nearest.
double missed_by_tokens(int64_t tokens, int64_t context) {
  tokens /= length_factor(context);
  MissedByTokens low = kMissedByTokens[0];
  for (const MissedByTokens& high : kMissedByTokens) {
    if (tokens <= high.tokens) {
      const auto span = static_cast<double>(std::max<int64_t>(1, high.tokens - low.tokens));
      const auto beyond = static_cast<double>(std::max<int64_t>(0, tokens - low.tokens));
      return low.missed + (high.missed - low.missed) * beyond / span;
    }
    low = high;
  }
  return low.missed;
}

std::string too_small(const Request& request, const Uses& need, const Settings& smallest) {
  std::string made_of;
  std::string predictor;  // last, since it is no part of the session
  const int64_t least = need.at("least");
  for (const auto& [name, now] : need) {
    if (name == "total" || name == "least" || name == "record_bytes") continue;
    const int64_t bytes = name == "staging" ? now + least - need.at("total") : now;
    if (bytes == 0) continue;
    const std::string use = name + " " + format_bytes(static_cast<double>(bytes));
    if (name == "predictor") {
      predictor = ", " + use;
    } else {
      made_of += (made_of.empty() ? "" : ", ") + use;
    }
  }
  return "kv_memory_bytes: must be at least " + both(least) + " for max_context " +
         std::to_string(request.context) + " and max_batch " + std::to_string(request.batch) +
         ", got " + both(request.kv_memory_bytes) + ". The minimum is made of " + made_of +
         predictor + ", with summary.rank " + shown(smallest.rank) + " and " +
         std::to_string(smallest.groups_max) + " groups of " +
         std::to_string(smallest.group_tokens) +
         " tokens. Lower max_context, max_batch, selection.recent_tokens or "
         "selection.group_tokens, or "
         "raise kv_memory_bytes";
}

namespace {

/// Settings that are lowered to a budget, and how far up they are; -1: the smallest do not fit.
struct Lowered {
  Settings settings;
  int64_t step = -1;
};

/// Lowered so far that two layers with pages at a time are worth their reads: by a quarter of the
/// groups and more, where sharing keeps a quarter more of them.
bool is_worth_sharing(const Lowered& apart, const Lowered& sharing, int64_t groups_max) {
  if (apart.step < 0) return sharing.step >= 0;
  return 4 * apart.settings.groups_max < 3 * groups_max &&
         4 * sharing.settings.groups_max >= 5 * apart.settings.groups_max;
}

}  // namespace

Settings fit_budget(const Request& request, const ModelShape& shape, const Settings& settings,
                    const Need& need, const Lowering& how) {
  const auto need_of = [&](const Settings& candidate) {
    return need(candidate, request.batch, request.context);
  };
  const auto fits = [&](const Settings& candidate) {
    return need_of(candidate).at("total") <= request.kv_memory_bytes;
  };
  const auto lowered = [&](const Settings& given) {
    const auto at = [&](int64_t step) { return between(given, shape, how.keeps_columns, step); };
    if (!fits(at(0))) return Lowered{.settings = at(0)};
    const int64_t step = largest(kSteps, [&](int64_t n) { return fits(at(n)); });
    return Lowered{.settings = at(step), .step = step};
  };
  Lowered best = lowered(settings);
  const bool may_share = how.may_share && settings.rows != "none" && !settings.resident_layers &&
                         shape.layers > kLayersSharing;
  if (may_share && best.step < kSteps) {
    Settings shared = settings;
    shared.resident_layers = kLayersSharing;
    const Lowered sharing = lowered(shared);
    const bool is_less =
        best.step < 0 && need_of(sharing.settings).at("total") < need_of(best.settings).at("total");
    if (is_less || is_worth_sharing(best, sharing, settings.groups_max)) best = sharing;
  }
  if (best.step < 0) {
    throw SessionError(SessionError::Kind::kBudget,
                       too_small(request, need_of(best.settings), best.settings));
  }
  return with_spare_pages(best.settings, settings.pages_max, fits);
}

Settings fit_pages(const Request& request, const Settings& settings, const Need& need,
                   int64_t ready_for) {
  int64_t context = request.context;
  const auto need_of = [&](const Settings& candidate) {
    return need(candidate, request.batch, context);
  };
  const auto fits = [&](const Settings& candidate) {
    return need_of(candidate).at("total") <= request.kv_memory_bytes;
  };
  Settings fewest = settings;
  fewest.pages_max = std::max(settings.groups_max, settings.select_queries_max);
  if (!fits(fewest)) {
    throw SessionError(SessionError::Kind::kBudget, too_small(request, need_of(fewest), fewest));
  }
  context = std::max(context, ready_for);
  if (!fits(fewest)) context = request.context;
  return with_spare_pages(fewest, settings.pages_max, fits);
}

namespace {

/// What a budget is divided into, and nats that it misses; none: it does not fit.
struct Division {
  Settings settings;
  double missed = std::numeric_limits<double>::infinity();

  bool fits() const { return missed < std::numeric_limits<double>::infinity(); }
};

/// Tries divisions of one budget.
class Divider {
 public:
  Divider(const Request& request, const ModelShape& shape, const Settings& settings,
          const Need& need, bool on_device, std::optional<int64_t> rank_max)
      : request_(request),
        shape_(shape),
        settings_(settings),
        need_(need),
        tables_(missed_by_rows(on_device)),
        rank_max_(rank_max) {}

  Uses need_of(const Settings& candidate) const {
    return need_(candidate, request_.batch, request_.context);
  }
  bool fits(const Settings& candidate) const {
    return need_of(candidate).at("total") <= request_.kv_memory_bytes;
  }
  int64_t total_of(const Division& division) const {
    return need_of(division.settings).at("total");
  }

  /// resident_layers: as in Settings.
  Settings smallest(std::optional<int64_t> resident_layers) const {
    return with(tables_.back().summary_dtype, tables_.back().by_columns[0].columns, kGroupsMin,
                resident_layers);
  }

  /// Of every number of columns with the most groups that fit, what misses least.
  Division best(std::optional<int64_t> resident_layers) const {
    const int64_t whole = (request_.context + settings_.group_tokens - 1) / settings_.group_tokens;
    Division best = {.settings = smallest(resident_layers)};
    for (const auto& [dtype, by_columns] : tables_) {
      if (best.missed < 0) break;  // exact already
      for (const MissedByColumns& by : by_columns) {
        if (rank_max_ && rank_of(by.columns) > std::max(*rank_max_, rank_of(by_columns[0].columns)))
          break;
        const auto of = [&, dtype = dtype](int64_t groups) {
          return with(dtype, by.columns, groups, resident_layers);
        };
        // What is read again in every step is not kept.
        const bool is_exact = !resident_layers && whole <= kGroupsMost && fits(of(whole));
        const int64_t low = is_exact ? whole : kGroupsMin;
        if (!fits(of(low))) break;
        const int64_t spare = std::max<int64_t>(0, settings_.groups_max - low);
        const int64_t groups =
            low + largest(spare, [&](int64_t more) { return fits(of(low + more)); });
        // What is exact misses nothing, and more columns do no harm to it.
        const double missed =
            is_exact
                ? -static_cast<double>(by.columns)
                : by.missed + missed_by_tokens(groups * settings_.group_tokens, request_.context);
        if (missed < best.missed) best = {.settings = of(groups), .missed = missed};
      }
    }
    return best;
  }

 private:
  int64_t rank_of(int64_t columns) const {
    const int64_t width = row_width(settings_, shape_.kv_heads, shape_.head_dim);
    return std::max<int64_t>(1, std::min(columns, width) / 2);
  }

  Settings with(const char* dtype, int64_t columns, int64_t groups,
                std::optional<int64_t> resident_layers) const {
    Settings chosen = settings_;
    chosen.summary_dtype = dtype;
    chosen.rank = std::min(rank_of(columns), rank_max_.value_or(columns));
    chosen.groups_max = groups;
    chosen.pages_max = std::max(groups, settings_.select_queries_max);
    chosen.resident_layers = resident_layers;
    return chosen;
  }

  const Request& request_;
  const ModelShape& shape_;
  const Settings& settings_;
  const Need& need_;
  const std::span<const MissedByRows> tables_;
  const std::optional<int64_t> rank_max_;
};

}  // namespace

Settings spend_budget(const Request& request, const ModelShape& shape, const Settings& settings,
                      const Need& need, bool on_device, std::optional<int64_t> rank_max) {
  const Divider divider(request, shape, settings, need, on_device, rank_max);
  Division best = divider.best(settings.resident_layers);
  if (best.missed > kReuseWorth && !on_device && shape.layers > kLayersSharing) {
    Division sharing = divider.best(kLayersSharing);
    const bool is_better = sharing.fits()
                               ? sharing.missed < best.missed - kReuseWorth
                               : !best.fits() && divider.total_of(sharing) < divider.total_of(best);
    if (is_better) best = std::move(sharing);
  }
  if (!best.fits()) {
    throw SessionError(SessionError::Kind::kBudget,
                       too_small(request, divider.need_of(best.settings), best.settings));
  }
  return with_spare_pages(best.settings, settings.pages_max,
                          [&](const Settings& candidate) { return divider.fits(candidate); });
}

namespace {

/// Without a calibration each layer chooses with its true query: see Python's default_config().
Settings default_settings(const ModelShape& shape, int64_t context) {
  Settings settings;
  settings.score = "mass";
  settings.groups_max *= length_factor(context);
  settings.pages_max *= length_factor(context);
  settings.rank = std::min(shape.width(), std::get<int64_t>(settings.rank));
  return settings;
}

void check_positive(const char* name, const std::optional<int64_t>& value) {
  if (!value || *value > 0) return;
  throw ConfigError(std::string(name) + ": must be a positive int or None, got " +
                    std::to_string(*value));
}

}  // namespace

int64_t FirstPass::context() const { return tokens + std::max<int64_t>(1024, tokens / 2); }

std::vector<int64_t> effective_ranks(const Settings& settings, const ModelShape& shape,
                                     bool calibrated) {
  if (!SummaryKind::find(settings.rows)->takes_projections) return {};
  std::vector<int64_t> ranks = ranks_of(settings, shape.layers);
  const int64_t width = row_width(settings, shape.kv_heads, shape.head_dim);
  const std::string& kind = settings.projection_kind;
  const bool is_doubled = !calibrated && (kind == "query_aware" || kind == "svd_keys");
  for (int64_t& rank : ranks) rank = std::min(width, is_doubled ? 2 * rank : rank);
  return ranks;
}

Settings settle(const SwapConfig* config, const ModelShape& shape, const Budget& budget,
                const Need& need, const FirstPass* first, bool on_device) {
  check_positive("max_context", budget.max_context);
  check_positive("max_batch", budget.max_batch);
  const int64_t context = budget.max_context.value_or(first ? first->context() : 1);
  const int64_t batch = budget.max_batch.value_or(first ? first->batch : 1);
  const bool is_known = budget.is_known() || first;
  const Settings base = !config    ? default_settings(shape, context)
                        : is_known ? config->for_batch_and_context(batch, context)
                                   : config->settings;
  if (!budget.kv_memory_bytes) return base;
  if (std::min({*budget.kv_memory_bytes, context, batch}) < 1) {
    throw ConfigError("kv_memory_bytes, max_context and max_batch: must be positive, got " +
                      std::to_string(*budget.kv_memory_bytes) + ", " + std::to_string(context) +
                      " and " + std::to_string(batch));
  }
  const Request request = {*budget.kv_memory_bytes, context, batch};
  // What a tuner has measured is not made slower.
  if (config) {
    const Lowering how = {.may_share = !on_device && config->table.empty()};
    return fit_budget(request, shape, base, need, how);
  }
  return spend_budget(request, shape, base, need, on_device);
}

}  // namespace kvswap
