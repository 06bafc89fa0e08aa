#include "engine/keeping.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "io/stopwatch.h"

namespace kvswap {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

}  // namespace

void Keeping::grow(std::vector<float>& mass, int64_t tokens) {
  if (static_cast<int64_t>(mass.size()) >= tokens) return;
  mass.reserve((tokens + kMassUnit - 1) / kMassUnit * kMassUnit);
  mass.resize(tokens, 0.0f);
}

int64_t Keeping::window(int64_t layer) const {
  return parts_.options.keeps_tokens(layer) && !is_given() ? parts_.options.keep_window : 0;
}

void Keeping::observe_chunk(int64_t layer, int64_t part, KeptTokens::Window window) {
  KeptTokens& kept = batch_.pages(part).kept(layer);
  kept.seen_columns = window.first_column + window.count;
  kept.window = std::move(window);
  kept.overlap.reset();
  kept.next.reset();
  kept.is_due = true;
}

Status Keeping::give_worth(int64_t layer, const GivenWorth& given) {
  const EngineOptions& options = parts_.options;
  const auto shown = [&] { return "give_worth: layer " + std::to_string(layer) + " "; };
  if (!is_given()) {
    return Status::invalid(
        shown() + "must have keeper=given to be told what tokens are worth, has " + options.keeper);
  }
  if (!options.keeps_tokens(layer)) {
    return Status::invalid(shown() +
                           "must keep tokens to be told what they are worth, and "
                           "attends everything");
  }
  const int64_t columns = batch_.layer(layer).columns;
  const bool fits = given.tokens >= 1 && given.tokens <= columns;
  if (given.sequences != batch_.size() || !fits) {
    return Status::invalid(shown() + "must be told of " + std::to_string(batch_.size()) +
                           " sequences and of at most its " + std::to_string(columns) +
                           " tokens, got " + std::to_string(given.sequences) + " and " +
                           std::to_string(given.tokens));
  }
  const auto is_wrong = [](float number) { return std::isnan(number); };
  const int64_t count = given.sequences * given.tokens;
  if (std::any_of(given.worth, given.worth + count, is_wrong) ||
      (given.decay != nullptr && std::any_of(given.decay, given.decay + count, is_wrong))) {
    return Status::invalid(shown() + "must be told numbers, got NaN");
  }
  const int64_t first = columns - given.tokens;
  for (int64_t part = 0; part < batch_.size(); ++part) {
    KeptTokens& kept = batch_.pages(part).kept(layer);
    if (static_cast<int64_t>(kept.mass.size()) < first) {
      return Status::invalid(shown() + "must be told of all tokens since its " +
                             std::to_string(kept.mass.size()) + "th, got those since its " +
                             std::to_string(first) + "th");
    }
    grow(kept.mass, columns);
    grow(kept.decay, columns);
    std::copy_n(given.worth + part * given.tokens, given.tokens, kept.mass.begin() + first);
    std::fill_n(kept.decay.begin() + first, given.tokens, 0.0f);
    if (given.decay != nullptr) {
      std::copy_n(given.decay + part * given.tokens, given.tokens, kept.decay.begin() + first);
    }
    const int64_t fresh = std::clamp<int64_t>(columns - kept.seen_columns, 0, given.tokens);
    kept.seen_columns = std::max(kept.seen_columns, columns);
    if (given.tokens > options.select_queries_max) {
      kept.is_due = true;
      kept.next.reset();
    } else {
      count_queries(kept, fresh);
    }
  }
  return Status::ok();
}

void Keeping::count_queries(KeptTokens& kept, int64_t fresh) {
  const int64_t interval = parts_.options.keep_interval;
  kept.queries_since += fresh;
  kept.is_due = kept.is_due || (interval > 0 && kept.queries_since >= interval);
}

Status Keeping::turn(int64_t layer, int64_t column) {
  if (!parts_.options.keeps_tokens(layer)) return Status::ok();
  const auto begin = [&] {
    return Stopwatch(parts_.timeline.get(), {.kind = SpanKind::kSelect, .layer = layer},
                     &parts_.counters.turn_seconds);
  };
  // How many stay is one number for all heads, which must have been weighed by then.
  for (int64_t part = 0; parts_.options.shares_groups() && part < batch_.size(); ++part) {
    if (!is_due(layer, part, column)) continue;
    const Stopwatch watch = begin();
    KVSWAP_RETURN_IF_ERROR(choose(layer, part));
  }
  for (int64_t part = 0; part < batch_.size(); ++part) {
    if (batch_.fits(layer, part)) continue;
    const KeptTokens& kept = batch_.pages(part).kept(layer);
    KVSWAP_RETURN_IF_ERROR(check_told(layer, kept));
    const int64_t sealed = batch_.layer(layer).sealed_groups * parts_.options.group_tokens;
    const bool is_turn = is_due(layer, part, column);
    if (!is_turn && !(joins() && kept.joined_columns < sealed)) continue;
    const Stopwatch watch = begin();
    KVSWAP_RETURN_IF_ERROR(is_turn ? turn_of(layer, part) : join(layer, part));
  }
  return Status::ok();
}

bool Keeping::is_due(int64_t layer, int64_t part, int64_t column) const {
  const KeptTokens& kept = batch_.pages(part).kept(layer);
  return !batch_.fits(layer, part) && kept.is_due && column >= kept.seen_columns;
}

/// Nothing must be dropped, or left on disk, of which nobody has said what it is worth.
Status Keeping::check_told(int64_t layer, const KeptTokens& kept) const {
  const int64_t sealed = batch_.layer(layer).sealed_groups * parts_.options.group_tokens;
  if (!is_given() || static_cast<int64_t>(kept.mass.size()) >= sealed) return Status::ok();
  return Status::invalid("attend: layer " + std::to_string(layer) + " must be told what its " +
                         std::to_string(sealed) + " tokens on disk are worth, got " +
                         std::to_string(kept.mass.size()) +
                         "; call give_worth() after each append");
}

/// Who is to be kept, unless that is known from a turn that failed.
Status Keeping::choose(int64_t layer, int64_t part) {
  const EngineOptions& options = parts_.options;
  KeptTokens& kept = batch_.pages(part).kept(layer);
  const int64_t sealed = batch_.layer(layer).sealed_groups * options.group_tokens;
  if (kept.next) return Status::ok();
  if (options.weighs_disk() && kept.window.count == 0) {
    kept.next = kept.columns();  // all that was decoded since has been cut
    return Status::ok();
  }
  KVSWAP_RETURN_IF_ERROR(weigh(layer, part, sealed));
  const KeepArgs args = {.mass = std::span(mass_of(kept)).first(sealed),
                         .valid = &batch_.validity(part),
                         .sinks = batch_.pages(part).sinks(layer),
                         .group_tokens = options.group_tokens,
                         .tokens = options.keep_tokens,
                         .floor = is_given() ? kNever : 0};
  kept.next = options.shares_groups() ? by_attention(args) : most_attended(args);
  kept.window.log_sum_exp = {};
  if (!options.weighs_disk()) kept.window = {};
  return Status::ok();
}

Status Keeping::turn_of(int64_t layer, int64_t part) {
  if (joins()) return turn_after_prompt(layer, part);
  KVSWAP_RETURN_IF_ERROR(choose(layer, part));
  KeptTokens& kept = batch_.pages(part).kept(layer);
  std::vector<int32_t> columns = *kept.next;
  if (parts_.options.shares_groups()) {
    columns.resize(std::min<int64_t>(share_of(layer, part), columns.size()));
    std::sort(columns.begin(), columns.end());
  }
  KVSWAP_RETURN_IF_ERROR(adopt(layer, part, std::move(columns)));
  kept.next.reset();
  if (!accumulates()) std::fill(kept.mass.begin(), kept.mass.end(), 0.0f);
  kept.queries_since = 0;
  kept.is_due = false;
  kept.joined_columns = batch_.layer(layer).sealed_groups * parts_.options.group_tokens;
  ++parts_.counters.turns;
  return Status::ok();
}

/// Those are kept from now on.
Status Keeping::adopt(int64_t layer, int64_t part, std::vector<int32_t> columns,
                      std::vector<int32_t> float8) {
  const EngineOptions& options = parts_.options;
  KeptTokens& kept = batch_.pages(part).kept(layer);
  if (columns == kept.columns() && float8 == kept.float8()) return Status::ok();
  KVSWAP_RETURN_IF_ERROR(gather(layer, part, columns));
  std::vector<int8_t> exponents;
  encode_kept(layer, part, float8, exponents);
  for (int64_t page = 0; page < options.kept_pages(); ++page) {
    std::memcpy(batch_.pages(part).kept_page(layer, page),
                gathered_.data() + page * options.group_bytes(), options.group_bytes());
  }
  kept.set_float8(std::move(float8), std::move(exponents));
  kept.set(std::move(columns), options.group_tokens);
  return Status::ok();
}

/// What a turn goes by: what stands from turn to turn, where steps are observed.
std::vector<float>& Keeping::mass_of(KeptTokens& kept) {
  return parts_.options.weighs_attended() ? kept.mass : mass_;
}

/// What each sealed token is worth now, to mass_of().
Status Keeping::weigh(int64_t layer, int64_t part, int64_t sealed) {
  KeptTokens& kept = batch_.pages(part).kept(layer);
  std::vector<float>& mass = mass_of(kept);
  if (is_given()) {
    mass.clear();
    grow(mass, sealed);
    const int64_t columns = batch_.layer(layer).columns;
    for (int64_t i = 0; i < sealed; ++i) {
      mass[i] = kept.mass[i] - static_cast<float>(columns - i) * kept.decay[i];
    }
    forget_gone(layer, part, mass);
    return Status::ok();
  }
  if (kept.window.count > 0) KVSWAP_RETURN_IF_ERROR(weigh_past(layer, part));
  grow(mass, sealed);
  if (!accumulates()) pool_neighbours(mass, parts_.options.keep_pool);
  forget_gone(layer, part, mass);
  return Status::ok();
}

bool Keeping::is_observed(const KeptTokens& kept) const {
  const EngineOptions& options = parts_.options;
  return options.weighs_attended() && !joins() &&
         (accumulates() || kept.queries_since + options.keep_window >= options.keep_interval);
}

float* Keeping::log_sum_exp(int64_t layer, int64_t queries) {
  if (!parts_.options.keeps_tokens(layer)) return nullptr;
  for (int64_t part = 0; part < batch_.size(); ++part) {
    if (!is_observed(batch_.pages(part).kept(layer)) && !lacks_room(layer, part)) continue;
    log_sums_.resize(batch_.size() * parts_.options.query_heads * queries);
    return log_sums_.data();
  }
  return nullptr;
}

void Keeping::observe_step(int64_t layer, const PagedAttentionArgs& attended) {
  const EngineOptions& options = parts_.options;
  if (joins()) return observe_kept(layer, attended);
  if (!options.keeps_tokens(layer) || options.keep_interval == 0 || is_given()) return;
  if (options.weighs_disk()) take_queries(layer, attended);
  const int64_t slots = attended.pages_max * options.group_tokens;
  bool is_weighed = false;
  for (int64_t part = 0; part < batch_.size(); ++part) {
    KeptTokens& kept = batch_.pages(part).kept(layer);
    const int64_t columns = batch_.layer(layer).columns;
    const int64_t fresh = std::clamp<int64_t>(columns - kept.seen_columns, 0, attended.queries);
    const bool is_part_observed = fresh > 0 && is_observed(kept);
    kept.seen_columns = std::max(kept.seen_columns, columns);
    count_queries(kept, fresh);
    if (!is_part_observed) continue;
    if (!is_weighed) {
      mean_.resize(batch_.size() * options.kv_heads * slots);
      attention_mass({.attention = attended, .mean = mean_.data()}, {.parallel = parts_.threads()});
      is_weighed = true;
    }
    grow(kept.mass, columns);
    const int64_t first = part * attended.pages_max;
    for (int64_t entry = 0; entry < attended.page_counts[part]; ++entry) {
      const int64_t column = attended.columns[first + entry];
      for (uint64_t left = attended.masks[first + entry]; left != 0; left &= left - 1) {
        const int64_t slot = __builtin_ctzll(left);
        // Pages of kept tokens stand before column 0, see PageTable.
        const int64_t token =
            column >= 0 ? column + slot : kept.columns()[-column - options.group_tokens + slot];
        for (int64_t head = 0; head < options.kv_heads; ++head) {
          kept.mass[token] +=
              static_cast<float>(fresh) *
              mean_[(part * options.kv_heads + head) * slots + entry * options.group_tokens + slot];
        }
      }
    }
  }
}

}  // namespace kvswap
