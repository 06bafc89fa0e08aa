#include "engine/retention/online_retention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <span>
#include <utility>

namespace kvswap {

void OnlineRetention::reserve(Arena& arena, const Plan& plan) {
  // New tokens, and of those kept what they score and their order.
  if (plan.retention.kind.retains_online) arena.take(Use::kStaging, plan.retention.tokens_max * 40);
}

/// Sealed tokens of [begin, end) that may be kept; of more than there is room for the newest.
std::vector<int32_t> OnlineRetention::newcomers(int64_t layer, int64_t sequence, int64_t begin,
                                                int64_t end) const {
  const EngineOptions& options = context_.options;
  const PaddingMask& validity = batch_.validity(sequence);
  std::vector<int32_t> positions;
  for (int64_t position = end; position-- > begin;) {
    if (static_cast<int64_t>(positions.size()) == options.keep_tokens) break;
    const int64_t group = position / options.group_tokens;
    const bool is_sink =
        batch_.is_sink(sequence, group) || batch_.is_pinned(layer, sequence, group);
    if (validity.is_valid(position) && !is_sink)
      positions.push_back(static_cast<int32_t>(position));
  }
  std::reverse(positions.begin(), positions.end());
  return positions;
}

int64_t OnlineRetention::room_of(size_t in_dtype, size_t in_float8) const {
  const int64_t each = context_.retention.float8_a_room;
  return static_cast<int64_t>(in_dtype) + (static_cast<int64_t>(in_float8) + each - 1) / each;
}

bool OnlineRetention::is_full(int64_t layer, int64_t sequence) const {
  const EngineOptions& options = context_.options;
  if (!context_.retention.kind.retains_online || !context_.plan.keeps_tokens(layer)) return false;
  const Batch::Layer& state = batch_.layer(layer);
  const RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  const int64_t sealed = std::max(state.sealed_groups, options.sealed_groups(state.positions));
  if (retained.is_due || retained.count() == 0 || batch_.fits(layer, sequence, sealed))
    return false;
  const std::vector<int32_t> fresh =
      newcomers(layer, sequence, retained.admitted_positions, sealed * options.group_tokens);
  return room_of(retained.positions().size() + fresh.size(), retained.float8().size()) >
         options.keep_tokens;
}

bool OnlineRetention::needs_catch_up(int64_t layer, int64_t sequence) const {
  const int64_t sealed = batch_.layer(layer).sealed_groups * context_.options.group_tokens;
  return context_.retention.kind.retains_online &&
         batch_.pages(sequence).retained(layer).admitted_positions < sealed;
}

Status OnlineRetention::refresh_after_prompt(int64_t layer, int64_t sequence,
                                             std::span<const float> mass) {
  const EngineOptions& options = context_.options;
  RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  const int64_t sealed = batch_.layer(layer).sealed_groups * options.group_tokens;
  const int64_t observed = std::min(sealed, retained.window.first_position + retained.window.count);
  const std::vector<int32_t> fresh = newcomers(layer, sequence, observed, sealed);
  std::vector<int32_t> positions = context_.retention.policy->select(
      {.mass = mass.first(observed),
       .valid = &batch_.validity(sequence),
       .sinks = batch_.pages(sequence).sinks(layer),
       .group_tokens = options.group_tokens,
       .tokens = options.keep_tokens - static_cast<int64_t>(fresh.size())});
  std::sort(positions.begin(), positions.end());
  positions.insert(positions.end(), fresh.begin(), fresh.end());
  KVSWAP_RETURN_IF_ERROR(retained_pages_.adopt(layer, sequence, std::move(positions)));
  retained.window = {};
  retained.next.reset();
  retained.is_due = false;
  retained.admitted_positions = sealed;
  ++context_.counters.refreshes;
  return Status::ok();
}

Status OnlineRetention::admit(int64_t layer, int64_t sequence) {
  const EngineOptions& options = context_.options;
  RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  const int64_t sealed = batch_.layer(layer).sealed_groups * options.group_tokens;
  const std::vector<int32_t> fresh =
      newcomers(layer, sequence, retained.admitted_positions, sealed);
  if (room_of(retained.positions().size() + fresh.size(), retained.float8().size()) >
      options.keep_tokens) {
    KVSWAP_RETURN_IF_ERROR(make_room(layer, sequence, fresh));
  } else if (!fresh.empty()) {
    KVSWAP_RETURN_IF_ERROR(retained_pages_.append(layer, sequence, fresh));
  }
  retained.next.reset();
  retained.admitted_positions = sealed;
  return Status::ok();
}

/// Of those kept the best stay beside the new ones: a share in the model's dtype, the next in e4m3.
Status OnlineRetention::make_room(int64_t layer, int64_t sequence, std::span<const int32_t> fresh) {
  const EngineOptions& options = context_.options;
  const RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  std::vector<int32_t> order;  // the best first; where nothing is known of them, the oldest
  if (retained.next) {
    order = *retained.next;
  } else {
    std::merge(retained.positions().begin(), retained.positions().end(), retained.float8().begin(),
               retained.float8().end(), std::back_inserter(order));
  }
  const auto most = static_cast<int64_t>(
      std::floor(ratio(layer, sequence) * static_cast<double>(options.keep_tokens) + 0.5));
  std::vector<int32_t> positions, float8;
  for (const int32_t position : order) {
    const bool is_full = static_cast<int64_t>(positions.size()) >= most;
    const bool is_float8 =
        is_full || std::binary_search(retained.float8().begin(), retained.float8().end(), position);
    (is_float8 ? float8 : positions).push_back(position);
    if (room_of(positions.size() + fresh.size(), float8.size()) <= options.keep_tokens) continue;
    (is_float8 ? float8 : positions).pop_back();
    break;
  }
  std::sort(positions.begin(), positions.end());
  std::sort(float8.begin(), float8.end());
  positions.insert(positions.end(), fresh.begin(), fresh.end());
  KVSWAP_RETURN_IF_ERROR(
      retained_pages_.adopt(layer, sequence, std::move(positions), std::move(float8)));
  ++context_.counters.refreshes;
  return Status::ok();
}

/// What stays in the model's dtype, of all there is room for.
double OnlineRetention::ratio(int64_t layer, int64_t sequence) const {
  double most = 0;
  for (int64_t other = 0; other < context_.options.layers; ++other) {
    most = std::max(most, batch_.pages(sequence).retained(other).quality.value_or(0.0));
  }
  return context_.retention.policy->share_in_dtype(batch_.pages(sequence).retained(layer).quality,
                                                   most);
}

Status OnlineRetention::observe_step(int64_t layer, const PagedAttentionArgs& attended,
                                     StepAttention& mass) {
  if (!context_.plan.keeps_tokens(layer)) return Status::ok();
  bool is_weighed = false;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    RetainedTokens& retained = batch_.pages(sequence).retained(layer);
    retained.seen_positions = std::max(retained.seen_positions, batch_.layer(layer).positions);
    retained.next.reset();
    if (!is_full(layer, sequence)) continue;
    if (!is_weighed) {
      KVSWAP_RETURN_IF_ERROR(mass.score(attended, context_.retention.step_numbers));
      is_weighed = true;
    }
    choose_survivors(layer, sequence, attended, mass);
  }
  return Status::ok();
}

void OnlineRetention::choose_survivors(int64_t layer, int64_t sequence,
                                       const PagedAttentionArgs& attended,
                                       const StepAttention& mass) {
  const EngineOptions& options = context_.options;
  RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  const int64_t group_tokens = options.group_tokens;
  const auto in_dtype = static_cast<int64_t>(retained.positions().size());
  const int64_t first_float8 = (in_dtype + group_tokens - 1) / group_tokens * group_tokens;
  std::vector<std::pair<int32_t, float>> received;
  received.reserve(retained.count());
  for (int64_t entry = 0; entry < attended.page_counts[sequence]; ++entry) {
    const int64_t position = attended.positions[sequence * attended.pages_max + entry];
    if (position >= 0) continue;
    const int64_t first = -position - group_tokens;  // see PageTable
    const bool is_float8 = first >= first_float8;
    const std::vector<int32_t>& positions = is_float8 ? retained.float8() : retained.positions();
    const int64_t place = first - (is_float8 ? first_float8 : 0);
    const int64_t tokens = std::min(group_tokens, static_cast<int64_t>(positions.size()) - place);
    std::array<float, 64> scores{};
    for (int64_t head = 0; head < options.kv_heads; ++head) {
      const float* squares = mass.squares(sequence, head, entry);
      context_.retention.policy->add_scores(
          {.layer = layer,
           .head = head,
           .sums = std::span(mass.means(sequence, head, entry), tokens),
           .squares = std::span(squares, squares != nullptr ? tokens : 0)},
          {scores.data(), 0});
    }
    for (int64_t slot = 0; slot < tokens; ++slot) {
      received.emplace_back(positions[place + slot], scores[slot]);
    }
  }
  std::sort(received.begin(), received.end());
  std::vector<int32_t> positions;
  importance_.clear();
  for (const auto& [position, importance] : received) {
    positions.push_back(position);
    importance_.push_back(importance);
  }
  retained.next = context_.retention.policy->survivors(positions, importance_);
}

}  // namespace kvswap
