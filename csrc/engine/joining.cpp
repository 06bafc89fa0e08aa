#include "engine/joining.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <utility>

namespace kvswap {

void Joining::reserve(Arena& arena, const Plan& plan) {
  // New tokens, and of those kept what they are worth and their order.
  if (plan.keep.kind.joins) arena.take(Use::kStaging, plan.keep.tokens_max * 40);
}

/// Sealed tokens of [begin, end) that may be kept; of more than there is room for the newest.
std::vector<int32_t> Joining::newcomers(int64_t layer, int64_t part, int64_t begin,
                                        int64_t end) const {
  const EngineOptions& options = parts_.options;
  const TokenValidity& validity = batch_.validity(part);
  std::vector<int32_t> positions;
  for (int64_t position = end; position-- > begin;) {
    if (static_cast<int64_t>(positions.size()) == options.keep_tokens) break;
    const int64_t group = position / options.group_tokens;
    const bool is_sink = batch_.is_sink(part, group) || batch_.is_pinned(layer, part, group);
    if (validity.is_valid(position) && !is_sink)
      positions.push_back(static_cast<int32_t>(position));
  }
  std::reverse(positions.begin(), positions.end());
  return positions;
}

int64_t Joining::room_of(size_t in_dtype, size_t in_float8) const {
  const int64_t each = parts_.keep.float8_a_room;
  return static_cast<int64_t>(in_dtype) + (static_cast<int64_t>(in_float8) + each - 1) / each;
}

bool Joining::lacks_room(int64_t layer, int64_t part) const {
  const EngineOptions& options = parts_.options;
  if (!parts_.keep.kind.joins || !parts_.plan.keeps_tokens(layer)) return false;
  const Batch::Layer& state = batch_.layer(layer);
  const KeptTokens& kept = batch_.pages(part).kept(layer);
  const int64_t sealed = std::max(state.sealed_groups, options.sealed_groups(state.positions));
  if (kept.is_due || kept.count() == 0 || batch_.fits(layer, part, sealed)) return false;
  const std::vector<int32_t> fresh =
      newcomers(layer, part, kept.joined_positions, sealed * options.group_tokens);
  return room_of(kept.positions().size() + fresh.size(), kept.float8().size()) >
         options.keep_tokens;
}

bool Joining::is_behind(int64_t layer, int64_t part) const {
  const int64_t sealed = batch_.layer(layer).sealed_groups * parts_.options.group_tokens;
  return parts_.keep.kind.joins && batch_.pages(part).kept(layer).joined_positions < sealed;
}

Status Joining::turn_after_prompt(int64_t layer, int64_t part, std::span<const float> mass) {
  const EngineOptions& options = parts_.options;
  KeptTokens& kept = batch_.pages(part).kept(layer);
  const int64_t sealed = batch_.layer(layer).sealed_groups * options.group_tokens;
  const int64_t observed = std::min(sealed, kept.window.first_position + kept.window.count);
  const std::vector<int32_t> fresh = newcomers(layer, part, observed, sealed);
  std::vector<int32_t> positions =
      most_attended({.mass = mass.first(observed),
                     .valid = &batch_.validity(part),
                     .sinks = batch_.pages(part).sinks(layer),
                     .group_tokens = options.group_tokens,
                     .tokens = options.keep_tokens - static_cast<int64_t>(fresh.size())});
  positions.insert(positions.end(), fresh.begin(), fresh.end());
  KVSWAP_RETURN_IF_ERROR(kept_pages_.adopt(layer, part, std::move(positions)));
  kept.window = {};
  kept.next.reset();
  kept.is_due = false;
  kept.joined_positions = sealed;
  ++parts_.counters.turns;
  return Status::ok();
}

Status Joining::join(int64_t layer, int64_t part) {
  const EngineOptions& options = parts_.options;
  KeptTokens& kept = batch_.pages(part).kept(layer);
  const int64_t sealed = batch_.layer(layer).sealed_groups * options.group_tokens;
  const std::vector<int32_t> fresh = newcomers(layer, part, kept.joined_positions, sealed);
  if (room_of(kept.positions().size() + fresh.size(), kept.float8().size()) > options.keep_tokens) {
    KVSWAP_RETURN_IF_ERROR(make_room(layer, part, fresh));
  } else if (!fresh.empty()) {
    KVSWAP_RETURN_IF_ERROR(kept_pages_.append(layer, part, fresh));
  }
  kept.next.reset();
  kept.joined_positions = sealed;
  return Status::ok();
}

/// Of those kept the best stay beside the new ones: a share in the model's dtype, the next in e4m3.
Status Joining::make_room(int64_t layer, int64_t part, std::span<const int32_t> fresh) {
  const EngineOptions& options = parts_.options;
  const KeptTokens& kept = batch_.pages(part).kept(layer);
  std::vector<int32_t> order;  // the best first; where nothing is known of them, the oldest
  if (kept.next) {
    order = *kept.next;
  } else {
    std::merge(kept.positions().begin(), kept.positions().end(), kept.float8().begin(),
               kept.float8().end(), std::back_inserter(order));
  }
  const auto most = static_cast<int64_t>(
      std::floor(ratio(layer, part) * static_cast<double>(options.keep_tokens) + 0.5));
  std::vector<int32_t> positions, float8;
  for (const int32_t position : order) {
    const bool is_full = static_cast<int64_t>(positions.size()) >= most;
    const bool is_float8 =
        is_full || std::binary_search(kept.float8().begin(), kept.float8().end(), position);
    (is_float8 ? float8 : positions).push_back(position);
    if (room_of(positions.size() + fresh.size(), float8.size()) <= options.keep_tokens) continue;
    (is_float8 ? float8 : positions).pop_back();
    break;
  }
  std::sort(positions.begin(), positions.end());
  std::sort(float8.begin(), float8.end());
  positions.insert(positions.end(), fresh.begin(), fresh.end());
  KVSWAP_RETURN_IF_ERROR(kept_pages_.adopt(layer, part, std::move(positions), std::move(float8)));
  ++parts_.counters.turns;
  return Status::ok();
}

/// What stays in the model's dtype, of all there is room for: ARKV (7).
double Joining::ratio(int64_t layer, int64_t part) const {
  const EngineOptions& options = parts_.options;
  const std::optional<double> own = batch_.pages(part).kept(layer).quality;
  if (options.keep_ratio || !own) return options.keep_ratio.value_or(1.0);
  double most = 0;
  for (int64_t other = 0; other < options.layers; ++other) {
    most = std::max(most, batch_.pages(part).kept(other).quality.value_or(0.0));
  }
  return most > 0 ? *own / most : 1.0;
}

Status Joining::observe_step(int64_t layer, const PagedAttentionArgs& attended, StepMass& mass) {
  if (!parts_.plan.keeps_tokens(layer)) return Status::ok();
  bool is_weighed = false;
  for (int64_t part = 0; part < batch_.size(); ++part) {
    KeptTokens& kept = batch_.pages(part).kept(layer);
    kept.seen_positions = std::max(kept.seen_positions, batch_.layer(layer).positions);
    kept.next.reset();
    if (!lacks_room(layer, part)) continue;
    if (!is_weighed) {
      KVSWAP_RETURN_IF_ERROR(mass.weigh(attended, parts_.keep.step_numbers));
      is_weighed = true;
    }
    choose_who_stays(layer, part, attended, mass);
  }
  return Status::ok();
}

void Joining::choose_who_stays(int64_t layer, int64_t part, const PagedAttentionArgs& attended,
                               const StepMass& mass) {
  const EngineOptions& options = parts_.options;
  KeptTokens& kept = batch_.pages(part).kept(layer);
  const int64_t group_tokens = options.group_tokens;
  const auto in_dtype = static_cast<int64_t>(kept.positions().size());
  const int64_t first_float8 = (in_dtype + group_tokens - 1) / group_tokens * group_tokens;
  std::vector<std::pair<int32_t, float>> paid;
  paid.reserve(kept.count());
  for (int64_t entry = 0; entry < attended.page_counts[part]; ++entry) {
    const int64_t position = attended.positions[part * attended.pages_max + entry];
    if (position >= 0) continue;
    const int64_t first = -position - group_tokens;  // see PageTable
    const bool is_float8 = first >= first_float8;
    const std::vector<int32_t>& positions = is_float8 ? kept.float8() : kept.positions();
    const int64_t place = first - (is_float8 ? first_float8 : 0);
    const int64_t tokens = std::min(group_tokens, static_cast<int64_t>(positions.size()) - place);
    for (int64_t slot = 0; slot < tokens; ++slot) {
      float worth = 0;
      for (int64_t head = 0; head < options.kv_heads; ++head) {
        const float mean = mass.means(part, head, entry)[slot];
        const float* squares = mass.squares(part, head, entry);
        worth += squares == nullptr ? mean : worth_of(mean, squares[slot], options.keep_variance);
      }
      paid.emplace_back(positions[place + slot], worth);
    }
  }
  std::sort(paid.begin(), paid.end());
  std::vector<int32_t> positions;
  worth_.clear();
  for (const auto& [position, worth] : paid) {
    positions.push_back(position);
    worth_.push_back(worth);
  }
  const double stay = std::floor(options.keep_slack * static_cast<double>(positions.size()));
  kept.next = who_stays({.positions = positions,
                         .worth = worth_,
                         .pool = options.keep_pool,
                         .tokens = static_cast<int64_t>(stay)});
}

}  // namespace kvswap
