#include "engine/keeping.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "io/stopwatch.h"

namespace kvswap {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

/// Counts what a turn takes as long as it lives. Nobody else's reads are finished meanwhile.
class TurnCost {
 public:
  TurnCost(EngineParts& parts, int64_t layer)
      : parts_(parts),
        watch_(parts.timeline.get(), {.kind = SpanKind::kSelect, .layer = layer},
               &parts.counters.turn_seconds),
        read_before_(bytes_read()) {}
  ~TurnCost() { parts_.counters.turn_bytes_read += bytes_read() - read_before_; }
  TurnCost(const TurnCost&) = delete;
  TurnCost& operator=(const TurnCost&) = delete;

 private:
  uint64_t bytes_read() const {
    const FetchCounters& reads = parts_.fetcher->counters();
    return reads.payload_bytes + reads.gap_bytes;
  }

  EngineParts& parts_;
  Stopwatch watch_;
  uint64_t read_before_;
};

}  // namespace

void Keeping::reserve(Arena& arena, const Plan& plan, const Extent& extent) {
  Dropping::reserve(arena, plan);
  KeptPages::reserve(arena, plan);
  SummaryExclusion::reserve(arena, plan);
  WindowWeigher::reserve(arena, plan);
  Joining::reserve(arena, plan);
  GroupFits::reserve(arena, plan);
  arena.take(Use::kScratch,
             size_product({extent.batch, plan.step_mass_bytes(plan.keep.step_numbers)}));
}

int64_t Keeping::window(int64_t layer) const {
  const EngineOptions& options = parts_.options;
  const bool is_observed = !parts_.keep.kind.is_given && !parts_.keep.kind.keeps_outliers;
  return parts_.plan.keeps_tokens(layer) && is_observed ? options.keep_window : 0;
}

void Keeping::note_chunk(int64_t layer, int64_t tokens) {
  if (!parts_.keep.kind.keeps_outliers || !parts_.plan.keeps_tokens(layer)) return;
  for (int64_t part = 0; part < batch_.size(); ++part) {
    KeptTokens& kept = batch_.pages(part).kept(layer);
    kept.seen_positions = batch_.layer(layer).positions;
    kept.note_chunk(kept.seen_positions - tokens);
  }
}

void Keeping::observe_chunk(int64_t layer, int64_t part, KeptTokens::Window window) {
  KeptTokens& kept = batch_.pages(part).kept(layer);
  kept.seen_positions = window.first_position + window.count;
  kept.note_chunk(window.first_position);
  kept.window = std::move(window);
}

bool Keeping::is_observed(const KeptTokens& kept) const {
  const EngineOptions& options = parts_.options;
  return parts_.keep.weighs_attended && !parts_.keep.kind.joins &&
         (parts_.keep.kind.accumulates ||
          kept.queries_since + options.keep_window >= options.keep_interval);
}

float* Keeping::log_sum_exp(int64_t layer, int64_t queries) {
  if (!parts_.plan.keeps_tokens(layer)) return nullptr;
  for (int64_t part = 0; part < batch_.size(); ++part) {
    const KeptTokens& kept = batch_.pages(part).kept(layer);
    if (is_observed(kept) || joining_.lacks_room(layer, part)) return step_.log_sum_exp(queries);
  }
  return nullptr;
}

Status Keeping::observe_step(int64_t layer, const PagedAttentionArgs& attended) {
  const EngineOptions& options = parts_.options;
  if (parts_.keep.kind.joins) return joining_.observe_step(layer, attended, step_);
  if (!parts_.plan.keeps_tokens(layer) || options.keep_interval == 0) return Status::ok();
  if (parts_.keep.kind.is_given) return Status::ok();
  if (parts_.keep.weighs_disk) KVSWAP_RETURN_IF_ERROR(take_queries(layer, attended));
  bool is_weighed = false;
  for (int64_t part = 0; part < batch_.size(); ++part) {
    KeptTokens& kept = batch_.pages(part).kept(layer);
    const int64_t positions = batch_.layer(layer).positions;
    const int64_t fresh = std::clamp<int64_t>(positions - kept.seen_positions, 0, attended.queries);
    const bool is_part_observed = fresh > 0 && is_observed(kept);
    kept.seen_positions = std::max(kept.seen_positions, positions);
    if (parts_.keep.weighs_disk) stagger(layer, part);
    kept.count_queries(fresh, options.keep_interval);
    if (is_part_observed) {
      if (!is_weighed) KVSWAP_RETURN_IF_ERROR(step_.weigh(attended));
      is_weighed = true;
      add_paid(layer, part, fresh, attended);
    }
    const bool may_pass = parts_.keep.weighs_attended && !parts_.keep.kind.accumulates;
    if (may_pass && batch_.fits(layer, part)) {
      kept.pass_turn(options.keep_interval, parts_.keep.shares_groups);
    }
  }
  return Status::ok();
}

/// So that turns are spread evenly: a layer's or sequence's first one comes earlier than that of
/// those before it.
void Keeping::stagger(int64_t layer, int64_t part) {
  KeptTokens& kept = batch_.pages(part).kept(layer);
  if (std::exchange(kept.is_staggered, true)) return;
  const int64_t number = layer * batch_.size() + part;
  kept.queries_since =
      parts_.options.keep_interval * number / (parts_.options.layers * batch_.size());
}

/// What the newest `queries` of an observed step paid, to the part's mass.
void Keeping::add_paid(int64_t layer, int64_t part, int64_t queries,
                       const PagedAttentionArgs& attended) {
  const EngineOptions& options = parts_.options;
  KeptTokens& kept = batch_.pages(part).kept(layer);
  if (std::exchange(kept.begins_anew, false)) kept.mass.clear();
  grow_mass(kept.mass, batch_.layer(layer).positions);
  const int64_t first = part * attended.pages_max;
  for (int64_t entry = 0; entry < attended.page_counts[part]; ++entry) {
    const int64_t position = attended.positions[first + entry];
    for (uint64_t left = attended.masks[first + entry]; left != 0; left &= left - 1) {
      const int64_t slot = __builtin_ctzll(left);
      // Pages of kept tokens stand before position 0, see PageTable.
      const int64_t token = position >= 0
                                ? position + slot
                                : kept.positions()[-position - options.group_tokens + slot];
      for (int64_t head = 0; head < options.kv_heads; ++head) {
        kept.mass[token] += static_cast<float>(queries) * step_.means(part, head, entry)[slot];
      }
    }
  }
}

/// Decoded queries become the newest of each part's window.
Status Keeping::take_queries(int64_t layer, const PagedAttentionArgs& attended) {
  const EngineOptions& options = parts_.options;
  const int64_t heads = options.query_heads;
  const int64_t bytes = dtype_bytes(options.dtype);
  Compute& compute = parts_.space->compute();
  const int64_t reach = (attended.batch - 1) * attended.query_batch_stride +
                        (attended.heads - 1) * attended.query_head_stride +
                        (attended.queries - 1) * attended.query_token_stride + options.head_dim;
  const auto queries =
      compute.look_at(static_cast<const std::byte*>(attended.query), reach * bytes, queries_);
  if (!queries.is_ok()) return queries.status();
  const float* sinks = nullptr;
  if (attended.sinks != nullptr) {
    const auto seen = compute.look_at(reinterpret_cast<const std::byte*>(attended.sinks),
                                      attended.heads * int64_t{sizeof(float)}, sinks_);
    if (!seen.is_ok()) return seen.status();
    sinks = reinterpret_cast<const float*>(seen.value());
  }
  for (int64_t part = 0; part < batch_.size(); ++part) {
    KeptTokens::Window& window = batch_.pages(part).kept(layer).window;
    const int64_t first_head = part % options.heads_apart * heads;
    const int64_t from = part / options.heads_apart * attended.query_batch_stride +
                         first_head * attended.query_head_stride;
    window.add({.queries = queries.value() + from * bytes,
                .head_stride = attended.query_head_stride * bytes,
                .query_stride = attended.query_token_stride * bytes,
                .row_bytes = options.head_dim * bytes,
                .heads = heads,
                .count = attended.queries,
                .first_position = batch_.layer(layer).positions - attended.queries},
               options.keep_window);
    window.scale = attended.scale;
    window.softcap = attended.softcap;
    window.sinks.clear();
    if (sinks == nullptr) continue;
    window.sinks.assign(sinks + first_head, sinks + first_head + heads);
  }
  return Status::ok();
}

Status Keeping::turn(int64_t layer, int64_t position) {
  if (!parts_.plan.keeps_tokens(layer)) return Status::ok();
  if (parts_.keep.kind.prefers_layers) return turn_of_layers(layer, position);
  // How many stay is one number for all heads, which must have been weighed by then.
  for (int64_t part = 0; parts_.keep.shares_groups && part < batch_.size(); ++part) {
    if (!is_due(layer, part, position)) continue;
    const TurnCost cost(parts_, layer);
    KVSWAP_RETURN_IF_ERROR(choose(layer, part));
  }
  for (int64_t part = 0; part < batch_.size(); ++part) {
    if (batch_.fits(layer, part)) continue;
    KVSWAP_RETURN_IF_ERROR(given_.check_given(layer, part));
    const bool is_turn = is_due(layer, part, position);
    if (!is_turn && !joining_.is_behind(layer, part)) continue;
    const TurnCost cost(parts_, layer);
    KVSWAP_RETURN_IF_ERROR(is_turn ? turn_of(layer, part) : joining_.join(layer, part));
  }
  return Status::ok();
}

/// All layers whose turn is due have it together: what each keeps depends on the others.
Status Keeping::turn_of_layers(int64_t layer, int64_t position) {
  const auto is_due_in = [&](int64_t of, int64_t part) {
    return parts_.plan.keeps_tokens(of) && is_due(of, part, position);
  };
  bool is_turn = false;
  for (int64_t part = 0; part < batch_.size(); ++part) is_turn |= is_due_in(layer, part);
  if (!is_turn) return Status::ok();
  const TurnCost cost(parts_, layer);
  for (int64_t other = 0; other < parts_.options.layers; ++other) {
    for (int64_t part = 0; part < batch_.size(); ++part) {
      if (is_due_in(other, part)) KVSWAP_RETURN_IF_ERROR(choose(other, part));
    }
  }
  return division_.adopt();
}

Status Keeping::turn_before_chunk(int64_t layer) {
  const int64_t positions = batch_.layer(layer).positions;
  for (int64_t part = 0; part < batch_.size(); ++part) {
    const KeptTokens::Window& window = batch_.pages(part).kept(layer).window;
    if (window.count > 0 && window.first_position + window.count > positions) return Status::ok();
  }
  KVSWAP_RETURN_IF_ERROR(turn(layer, positions));
  dropping_.drop_past(layer);
  return Status::ok();
}

bool Keeping::is_due(int64_t layer, int64_t part, int64_t position) const {
  const KeptTokens& kept = batch_.pages(part).kept(layer);
  return !batch_.fits(layer, part) && kept.is_due && position >= kept.due_from;
}

Status Keeping::turn_of(int64_t layer, int64_t part) {
  KeptTokens& kept = batch_.pages(part).kept(layer);
  if (parts_.keep.kind.joins) {
    KVSWAP_RETURN_IF_ERROR(weigh(layer, part));
    return joining_.turn_after_prompt(layer, part, mass_);
  }
  KVSWAP_RETURN_IF_ERROR(choose(layer, part));
  std::vector<int32_t> positions = *kept.next;
  if (parts_.keep.shares_groups) {
    positions.resize(std::min<int64_t>(share_of(layer, part), positions.size()));
    std::sort(positions.begin(), positions.end());
  }
  KVSWAP_RETURN_IF_ERROR(kept_pages_.adopt(layer, part, std::move(positions)));
  KVSWAP_RETURN_IF_ERROR(exclusion_.update(layer, part));
  if (!parts_.keep.kind.accumulates) std::fill(kept.mass.begin(), kept.mass.end(), 0.0f);
  // Where turns are staggered a prompt's, and one that comes late, leaves them so.
  const int64_t since =
      parts_.keep.weighs_disk ? kept.queries_since % parts_.options.keep_interval : 0;
  kept.end_turn(batch_.layer(layer).sealed_groups * parts_.options.group_tokens);
  kept.queries_since = since;
  ++parts_.counters.turns;
  return Status::ok();
}

/// Who is to be kept, unless that is known from a turn that failed.
Status Keeping::choose(int64_t layer, int64_t part) {
  const EngineOptions& options = parts_.options;
  KeptTokens& kept = batch_.pages(part).kept(layer);
  const int64_t sealed = batch_.layer(layer).sealed_groups * options.group_tokens;
  if (kept.next) return Status::ok();
  if (parts_.keep.weighs_disk && kept.window.count == 0) {
    kept.next = kept.positions();  // all that was decoded since has been cut
    return Status::ok();
  }
  KVSWAP_RETURN_IF_ERROR(weigh(layer, part));
  const bool is_measured = parts_.keep.kind.is_given || parts_.keep.kind.keeps_outliers;
  const KeepArgs args = {.mass = std::span(mass_of(kept)).first(sealed),
                         .valid = &batch_.validity(part),
                         .sinks = batch_.pages(part).sinks(layer),
                         .group_tokens = options.group_tokens,
                         .tokens = division_.most(layer),
                         .floor = is_measured ? kNever : 0};
  const bool is_ranked = parts_.keep.shares_groups || parts_.keep.kind.prefers_layers;
  kept.next = is_ranked ? by_attention(args) : most_attended(args);
  kept.candidates = static_cast<int64_t>(kept.next->size());
  kept.window.log_sum_exp = {};
  if (!parts_.keep.weighs_disk) kept.window = {};
  return Status::ok();
}

/// What a turn goes by: what stands from turn to turn, where steps are observed.
std::vector<float>& Keeping::mass_of(KeptTokens& kept) {
  return parts_.keep.weighs_attended ? kept.mass : mass_;
}

/// What each sealed token is worth now, to mass_of().
Status Keeping::weigh(int64_t layer, int64_t part) {
  KeptTokens& kept = batch_.pages(part).kept(layer);
  std::vector<float>& mass = mass_of(kept);
  if (parts_.keep.kind.is_given) {
    given_.weigh(layer, part, mass);
  } else if (parts_.keep.kind.keeps_outliers) {
    KVSWAP_RETURN_IF_ERROR(fits_.weigh(layer, part, mass));
  } else {
    if (kept.window.count > 0) {
      if (&mass != &kept.mass || kept.begins_anew) mass.clear();
      kept.begins_anew = true;  // of half a sum nothing can be made
      KVSWAP_RETURN_IF_ERROR(weigher_.weigh(layer, part, mass));
      kept.begins_anew = false;
    }
    grow_mass(mass, batch_.layer(layer).sealed_groups * parts_.options.group_tokens);
    if (!parts_.keep.kind.accumulates) pool_neighbours(mass, parts_.options.keep_pool);
  }
  dropping_.forget_gone(layer, part, mass);
  return Status::ok();
}

/// Tokens of a layer that stay, whole groups, the same for all heads: PRKV (5).
int64_t Keeping::share_of(int64_t layer, int64_t part) const {
  const EngineOptions& options = parts_.options;
  const int64_t first = part / options.heads_apart * options.heads_apart;
  double agreed = 0;
  for (int64_t other = first; other < first + options.heads_apart; ++other) {
    // Without a prompt the paper's usual quarter.
    const double usual = 0.25 * static_cast<double>(options.selected_tokens());
    agreed += batch_.pages(other).kept(layer).overlap.value_or(usual);
  }
  const double groups = agreed / static_cast<double>(options.heads_apart * options.group_tokens);
  const auto tokens = static_cast<int64_t>(std::floor(groups)) * options.group_tokens;
  return std::min(tokens, options.keep_tokens / options.group_tokens * options.group_tokens);
}

}  // namespace kvswap
