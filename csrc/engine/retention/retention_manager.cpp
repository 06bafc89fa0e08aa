#include "engine/retention/retention_manager.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <utility>

#include "io/stopwatch.h"

namespace kvswap {
namespace {

/// Counts what a refresh takes as long as it lives. Nobody else's reads are finished meanwhile.
class RefreshCost {
 public:
  RefreshCost(EngineContext& context, int64_t layer)
      : context_(context),
        watch_(context.timeline.get(), {.kind = SpanKind::kSelect, .layer = layer},
               &context.counters.refresh_seconds),
        read_before_(bytes_read()) {}
  ~RefreshCost() { context_.counters.refresh_bytes_read += bytes_read() - read_before_; }
  RefreshCost(const RefreshCost&) = delete;
  RefreshCost& operator=(const RefreshCost&) = delete;

 private:
  uint64_t bytes_read() const {
    const FetchCounters& reads = context_.fetcher->counters();
    return reads.payload_bytes + reads.gap_bytes;
  }

  EngineContext& context_;
  Stopwatch watch_;
  uint64_t read_before_;
};

/// What a step attended of one page of its table.
struct AttendedSlots {
  int64_t count = 0;
  std::array<int64_t, 64> slots;   // of the page
  std::array<int32_t, 64> tokens;  // their positions
};

/// entry: of the page, in the table. Pages of retained tokens stand before position 0, see
/// PageTable.
AttendedSlots attended_slots(const PagedAttentionArgs& attended, int64_t entry,
                             const RetainedTokens& retained) {
  AttendedSlots found;
  const int64_t position = attended.positions[entry];
  for (uint64_t left = attended.masks[entry]; left != 0; left &= left - 1) {
    const int64_t slot = __builtin_ctzll(left);
    found.slots[found.count] = slot;
    found.tokens[found.count++] = static_cast<int32_t>(
        position >= 0 ? position + slot
                      : retained.positions()[-position - attended.shape.group_tokens + slot]);
  }
  return found;
}

}  // namespace

void RetentionManager::reserve(Arena& arena, const Plan& plan, const Extent& extent) {
  TokenEviction::reserve(arena, plan);
  RetainedPages::reserve(arena, plan);
  SummaryExclusion::reserve(arena, plan);
  ObservationScorer::reserve(arena, plan);
  OnlineRetention::reserve(arena, plan);
  KeyScorer::reserve(arena, plan);
  arena.take(Use::kScratch,
             size_product({extent.batch, plan.step_attention_bytes(plan.retention.step_numbers)}));
}

int64_t RetentionManager::window(int64_t layer) const {
  const EngineOptions& options = context_.options;
  const bool is_observed = context_.retention.kind.scored_by == ScoredBy::kAttention;
  return context_.plan.keeps_tokens(layer) && is_observed ? options.keep_window : 0;
}

void RetentionManager::note_chunk(int64_t layer, int64_t tokens) {
  if (context_.retention.kind.scored_by != ScoredBy::kKeys || !context_.plan.keeps_tokens(layer))
    return;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    RetainedTokens& retained = batch_.pages(sequence).retained(layer);
    retained.seen_positions = batch_.layer(layer).positions;
    retained.note_chunk(retained.seen_positions - tokens);
  }
}

void RetentionManager::observe_chunk(int64_t layer, int64_t sequence,
                                     RetainedTokens::Window window) {
  RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  retained.seen_positions = window.first_position + window.count;
  retained.note_chunk(window.first_position);
  retained.window = std::move(window);
}

bool RetentionManager::is_observed(const RetainedTokens& retained) const {
  const EngineOptions& options = context_.options;
  return context_.retention.scores_attended && !context_.retention.kind.retains_online &&
         (context_.retention.kind.accumulates ||
          retained.queries_since + options.keep_window >= options.keep_interval);
}

float* RetentionManager::log_sum_exp(int64_t layer, int64_t queries) {
  if (!context_.plan.keeps_tokens(layer)) return nullptr;
  if (context_.retention.tells_attention) return step_.log_sum_exp(queries);
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    const RetainedTokens& retained = batch_.pages(sequence).retained(layer);
    if (is_observed(retained) || online_.is_full(layer, sequence))
      return step_.log_sum_exp(queries);
  }
  return nullptr;
}

Status RetentionManager::observe_step(int64_t layer, const PagedAttentionArgs& attended) {
  const EngineOptions& options = context_.options;
  if (context_.retention.kind.retains_online) return online_.observe_step(layer, attended, step_);
  if (!context_.plan.keeps_tokens(layer) || options.keep_interval == 0) return Status::ok();
  if (context_.retention.kind.scored_by != ScoredBy::kAttention) return Status::ok();
  if (context_.retention.scores_all_tokens) KVSWAP_RETURN_IF_ERROR(take_queries(layer, attended));
  bool is_weighed = false;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    RetainedTokens& retained = batch_.pages(sequence).retained(layer);
    const int64_t positions = batch_.layer(layer).positions;
    const int64_t fresh =
        std::clamp<int64_t>(positions - retained.seen_positions, 0, attended.queries);
    const bool is_part_observed = fresh > 0 && is_observed(retained);
    retained.seen_positions = std::max(retained.seen_positions, positions);
    if (context_.retention.scores_all_tokens) stagger(layer, sequence);
    retained.count_queries(fresh, options.keep_interval);
    if (is_part_observed) {
      if (!is_weighed) {
        KVSWAP_RETURN_IF_ERROR(step_.score(attended, context_.retention.step_numbers));
      }
      is_weighed = true;
      accumulate_attention(layer, sequence, fresh, attended);
    }
    const bool may_pass =
        context_.retention.scores_attended && !context_.retention.kind.accumulates;
    if (may_pass && batch_.fits(layer, sequence)) {
      retained.skip_refresh(options.keep_interval, context_.retention.shares_groups);
    }
  }
  return Status::ok();
}

/// So that refreshes are spread evenly: a layer's or sequence's first one comes earlier than that
/// of those before it.
void RetentionManager::stagger(int64_t layer, int64_t sequence) {
  RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  if (std::exchange(retained.is_staggered, true)) return;
  const int64_t number = layer * batch_.size() + sequence;
  retained.queries_since =
      context_.options.keep_interval * number / (context_.options.layers * batch_.size());
}

/// Adds the attention of an observed step's newest `queries` to the sequence's mass.
void RetentionManager::accumulate_attention(int64_t layer, int64_t sequence, int64_t queries,
                                            const PagedAttentionArgs& attended) {
  const EngineOptions& options = context_.options;
  RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  if (std::exchange(retained.begins_anew, false)) retained.mass.clear();
  grow_mass(retained.mass, batch_.layer(layer).positions);
  const int64_t first = sequence * attended.pages_max;
  for (int64_t entry = 0; entry < attended.page_counts[sequence]; ++entry) {
    const AttendedSlots page = attended_slots(attended, first + entry, retained);
    const BlockScores scores(retained.mass.data(), 0, page.tokens.data());
    for (int64_t head = 0; head < options.kv_heads; ++head) {
      const float* means = step_.means(sequence, head, entry);
      const float* squares = step_.squares(sequence, head, entry);
      std::array<float, 64> sums, sums_of_squares;
      for (int64_t i = 0; i < page.count; ++i) {
        sums[i] = static_cast<float>(queries) * means[page.slots[i]];
        if (squares != nullptr)
          sums_of_squares[i] = static_cast<float>(queries) * squares[page.slots[i]];
      }
      context_.retention.policy->add_scores(
          {.layer = layer,
           .head = head,
           .samples = queries,
           .sums = std::span(sums).first(page.count),
           .squares = std::span(sums_of_squares).first(squares != nullptr ? page.count : 0)},
          scores);
    }
  }
}

Status RetentionManager::check_tells(int64_t layer) const {
  if (context_.retention.tells_attention && context_.plan.keeps_tokens(layer)) return Status::ok();
  return Status::invalid(
      "attend: layer " + std::to_string(layer) +
      " must retain tokens that are given, in a cache opened with tells_attention, to tell what "
      "each token received");
}

Status RetentionManager::tell_step(int64_t layer, const PagedAttentionArgs& attended,
                                   float* received) {
  KVSWAP_RETURN_IF_ERROR(step_.score(attended));
  const int64_t heads = context_.options.kv_heads;
  const int64_t positions = batch_.layer(layer).positions;
  std::fill_n(received, batch_.size() * heads * positions, 0.0f);
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    const RetainedTokens& retained = batch_.pages(sequence).retained(layer);
    const int64_t first = sequence * attended.pages_max;
    for (int64_t entry = 0; entry < attended.page_counts[sequence]; ++entry) {
      const AttendedSlots page = attended_slots(attended, first + entry, retained);
      for (int64_t head = 0; head < heads; ++head) {
        const float* means = step_.means(sequence, head, entry);
        float* row = received + (sequence * heads + head) * positions;
        for (int64_t i = 0; i < page.count; ++i) {
          const float mean = means[page.slots[i]];
          if (mean > 0) row[page.tokens[i]] += mean;  // NaN, of a query that is padding: nothing
        }
      }
    }
  }
  return Status::ok();
}

/// Decoded queries become the newest of each sequence's window.
Status RetentionManager::take_queries(int64_t layer, const PagedAttentionArgs& attended) {
  const EngineOptions& options = context_.options;
  const int64_t heads = options.query_heads;
  const int64_t bytes = dtype_bytes(options.dtype);
  Compute& compute = context_.space->compute();
  const int64_t reach = (attended.batch - 1) * attended.query_batch_stride +
                        (attended.heads - 1) * attended.query_head_stride +
                        (attended.queries - 1) * attended.query_token_stride + options.head_dim;
  const auto queries =
      compute.map_for_host(static_cast<const std::byte*>(attended.query), reach * bytes, queries_);
  if (!queries.is_ok()) return queries.status();
  const float* sinks = nullptr;
  if (attended.sinks != nullptr) {
    const auto seen = compute.map_for_host(reinterpret_cast<const std::byte*>(attended.sinks),
                                           attended.heads * int64_t{sizeof(float)}, sinks_);
    if (!seen.is_ok()) return seen.status();
    sinks = reinterpret_cast<const float*>(seen.value());
  }
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    RetainedTokens::Window& window = batch_.pages(sequence).retained(layer).window;
    const int64_t first_head = sequence % options.heads_apart * heads;
    const int64_t from = sequence / options.heads_apart * attended.query_batch_stride +
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

Status RetentionManager::refresh(int64_t layer, int64_t position) {
  if (!context_.plan.keeps_tokens(layer)) return Status::ok();
  if (context_.retention.kind.divides_layers) return refresh_layers(layer, position);
  // How many stay is one number for all heads, which must have been weighed by then.
  for (int64_t sequence = 0; context_.retention.shares_groups && sequence < batch_.size();
       ++sequence) {
    if (!is_due(layer, sequence, position)) continue;
    const RefreshCost cost(context_, layer);
    KVSWAP_RETURN_IF_ERROR(choose(layer, sequence));
  }
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    if (batch_.fits(layer, sequence)) continue;
    KVSWAP_RETURN_IF_ERROR(given_.check_given(layer, sequence));
    const bool is_refresh = is_due(layer, sequence, position);
    if (!is_refresh && !online_.needs_catch_up(layer, sequence)) continue;
    const RefreshCost cost(context_, layer);
    KVSWAP_RETURN_IF_ERROR(is_refresh ? refresh_sequence(layer, sequence)
                                      : online_.admit(layer, sequence));
  }
  return Status::ok();
}

/// All layers whose refresh is due have it together: what each retains depends on the others.
Status RetentionManager::refresh_layers(int64_t layer, int64_t position) {
  const auto is_due_in = [&](int64_t of, int64_t sequence) {
    return context_.plan.keeps_tokens(of) && is_due(of, sequence, position);
  };
  bool is_refresh = false;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence)
    is_refresh |= is_due_in(layer, sequence);
  if (!is_refresh) return Status::ok();
  const RefreshCost cost(context_, layer);
  for (int64_t other = 0; other < context_.options.layers; ++other) {
    for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
      if (is_due_in(other, sequence)) KVSWAP_RETURN_IF_ERROR(choose(other, sequence));
    }
  }
  return budgets_.adopt();
}

Status RetentionManager::refresh_before_chunk(int64_t layer) {
  const int64_t positions = batch_.layer(layer).positions;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    const RetainedTokens::Window& window = batch_.pages(sequence).retained(layer).window;
    if (window.count > 0 && window.first_position + window.count > positions) return Status::ok();
  }
  KVSWAP_RETURN_IF_ERROR(refresh(layer, positions));
  eviction_.discard_prefix(layer);
  return Status::ok();
}

bool RetentionManager::is_due(int64_t layer, int64_t sequence, int64_t position) const {
  const RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  return !batch_.fits(layer, sequence) && retained.is_due && position >= retained.due_from;
}

Status RetentionManager::refresh_sequence(int64_t layer, int64_t sequence) {
  RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  if (context_.retention.kind.retains_online) {
    KVSWAP_RETURN_IF_ERROR(score(layer, sequence));
    return online_.refresh_after_prompt(layer, sequence, mass_);
  }
  KVSWAP_RETURN_IF_ERROR(choose(layer, sequence));
  std::vector<int32_t> positions = *retained.next;
  if (context_.retention.shares_groups) {
    positions.resize(std::min<int64_t>(share_of(layer, sequence), positions.size()));
    std::sort(positions.begin(), positions.end());
  }
  KVSWAP_RETURN_IF_ERROR(retained_pages_.adopt(layer, sequence, std::move(positions)));
  KVSWAP_RETURN_IF_ERROR(exclusion_.update(layer, sequence));
  if (!context_.retention.kind.accumulates)
    std::fill(retained.mass.begin(), retained.mass.end(), 0.0f);
  // Where refreshes are staggered a prompt's, and one that comes late, leaves them so.
  const int64_t since = context_.retention.scores_all_tokens
                            ? retained.queries_since % context_.options.keep_interval
                            : 0;
  retained.end_refresh(batch_.layer(layer).sealed_groups * context_.options.group_tokens);
  retained.queries_since = since;
  ++context_.counters.refreshes;
  return Status::ok();
}

/// Who is to be kept, unless that is known from a refresh that failed.
Status RetentionManager::choose(int64_t layer, int64_t sequence) {
  const EngineOptions& options = context_.options;
  RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  const int64_t sealed = batch_.layer(layer).sealed_groups * options.group_tokens;
  if (retained.next) return Status::ok();
  if (context_.retention.scores_all_tokens && retained.window.count == 0) {
    retained.next = retained.positions();  // all that was decoded since has been cut
    return Status::ok();
  }
  KVSWAP_RETURN_IF_ERROR(score(layer, sequence));
  const RetainArgs args = {.mass = std::span(mass_of(retained)).first(sealed),
                           .valid = &batch_.validity(sequence),
                           .sinks = batch_.pages(sequence).sinks(layer),
                           .group_tokens = options.group_tokens,
                           .tokens = budgets_.most(layer)};
  const bool is_ranked = context_.retention.shares_groups || context_.retention.kind.divides_layers;
  retained.next = context_.retention.policy->select(args);
  if (!is_ranked) std::sort(retained.next->begin(), retained.next->end());
  retained.candidates = static_cast<int64_t>(retained.next->size());
  retained.window.log_sum_exp = {};
  if (!context_.retention.scores_all_tokens) retained.window = {};
  return Status::ok();
}

/// What a refresh goes by: what is kept from refresh to refresh, where steps are observed.
std::vector<float>& RetentionManager::mass_of(RetainedTokens& retained) {
  return context_.retention.scores_attended ? retained.mass : mass_;
}

/// What each sealed token scores now, to mass_of().
Status RetentionManager::score(int64_t layer, int64_t sequence) {
  RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  std::vector<float>& mass = mass_of(retained);
  if (context_.retention.kind.scored_by == ScoredBy::kUser) {
    given_.score(layer, sequence, mass);
  } else if (context_.retention.kind.scored_by == ScoredBy::kKeys) {
    KVSWAP_RETURN_IF_ERROR(keys_.score(layer, sequence, mass));
  } else {
    if (retained.window.count > 0) {
      if (&mass != &retained.mass || retained.begins_anew) mass.clear();
      retained.begins_anew = true;  // of half a sum nothing can be made
      KVSWAP_RETURN_IF_ERROR(observation_.score(layer, sequence, mass));
      retained.begins_anew = false;
    }
    grow_mass(mass, batch_.layer(layer).sealed_groups * context_.options.group_tokens);
    context_.retention.policy->smooth(mass);
  }
  eviction_.mask_discarded(layer, sequence, mass);
  return Status::ok();
}

/// Tokens of a layer that stay, whole groups, the same for all heads: PRKV (5).
int64_t RetentionManager::share_of(int64_t layer, int64_t sequence) const {
  const EngineOptions& options = context_.options;
  const int64_t first = sequence / options.heads_apart * options.heads_apart;
  double agreed = 0;
  for (int64_t other = first; other < first + options.heads_apart; ++other) {
    // Without a prompt the paper's usual quarter.
    const double usual = 0.25 * static_cast<double>(options.selected_tokens());
    agreed += batch_.pages(other).retained(layer).overlap.value_or(usual);
  }
  const double groups = agreed / static_cast<double>(options.heads_apart * options.group_tokens);
  const auto tokens = static_cast<int64_t>(std::floor(groups)) * options.group_tokens;
  return std::min(tokens, options.keep_tokens / options.group_tokens * options.group_tokens);
}

}  // namespace kvswap
