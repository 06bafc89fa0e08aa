#include "engine/retention/summary_exclusion.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include "engine/sequence/token_codec.h"

namespace kvswap {
namespace {

constexpr int64_t kGroupsAtOnce = 64;  // read together

}  // namespace

void SummaryExclusion::reserve(Arena& arena, const Plan& plan) {
  if (!plan.options.exclude_from_summary) return;
  const int64_t loads = kGroupsAtOnce * Fetch::bytes_per_load();
  const int64_t changed = 2 * plan.retention.tokens_max * int64_t{sizeof(int32_t)};
  arena.take(Use::kStaging, loads + changed + plan.group_bytes);
}

/// Groups with a token that is retained and not left out, or the other way round.
void SummaryExclusion::find_changed(const RetainedTokens& retained) {
  std::vector<int32_t> tokens;
  std::set_symmetric_difference(retained.positions().begin(), retained.positions().end(),
                                retained.excluded.begin(), retained.excluded.end(),
                                std::back_inserter(tokens));
  changed_.clear();
  const auto group_tokens = static_cast<int32_t>(context_.options.group_tokens);
  for (const int32_t token : tokens) {
    if (changed_.empty() || changed_.back() != token / group_tokens) {
      changed_.push_back(token / group_tokens);
    }
  }
}

Status SummaryExclusion::update(int64_t layer, int64_t sequence) {
  if (!context_.options.exclude_from_summary || !context_.selector->is_ready(layer))
    return Status::ok();
  RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  find_changed(retained);
  const auto most =
      static_cast<size_t>(std::min(kGroupsAtOnce, 2 * context_.plan.past_block_groups));
  for (size_t first = 0; first < changed_.size(); first += most) {
    const auto groups = std::span(changed_).subspan(first);
    const auto now = groups.first(std::min(groups.size(), most));
    KVSWAP_RETURN_IF_ERROR(rewrite(layer, sequence, now));
    // Up to here rows are as they shall be.
    const int64_t end = (now.back() + 1) * context_.options.group_tokens;
    const std::vector<int32_t>& positions = retained.positions();
    std::vector<int32_t> excluded(positions.begin(),
                                  std::lower_bound(positions.begin(), positions.end(), end));
    excluded.insert(excluded.end(),
                    std::lower_bound(retained.excluded.begin(), retained.excluded.end(), end),
                    retained.excluded.end());
    retained.excluded = std::move(excluded);
  }
  return context_.space->compute().hand_back();
}

Status SummaryExclusion::rewrite(int64_t layer, int64_t sequence, std::span<const int32_t> groups) {
  const int64_t group_tokens = context_.options.group_tokens;
  auto blocks = past_.blocks();
  if (!blocks.is_ok()) return blocks.status();
  KVSWAP_RETURN_IF_ERROR(sealer_.drain_layer(layer));
  fetch_.layer = layer;
  fetch_.loads.clear();
  for (const int32_t group : groups) {
    const auto place = static_cast<int64_t>(fetch_.loads.size());
    std::byte* target = blocks.value().slots[0] + place * context_.record_bytes();
    fetch_.loads.push_back({.sequence = sequence, .group = group, .target = target});
  }
  KVSWAP_RETURN_IF_ERROR(context_.fetcher->submit(fetch_));
  Status arrived = context_.fetcher->finish(fetch_);
  if (arrived.is_pending()) context_.fetcher->abandon(fetch_, blocks.value().memory);
  KVSWAP_RETURN_IF_ERROR(arrived);

  std::optional<PagePool> on_device;
  if (context_.options.device) {
    auto made = context_.space->make_pool(std::ssize(groups), context_.plan.token_page_bytes);
    if (!made.is_ok()) return made.status();
    on_device.emplace(std::move(made.value()));
  }
  const RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  std::vector<int8_t> note(context_.plan.note_bytes);
  room_.resize(context_.plan.group_bytes);
  for (size_t i = 0; i < fetch_.loads.size(); ++i) {
    const Load& load = fetch_.loads[i];
    context_.store->copy_note(layer, sequence, load.group, note.data());
    const std::byte* page = tokens_of_page(context_.plan, load.target, note.data(), room_.data());
    if (on_device) {
      std::byte* there = on_device->page(static_cast<int32_t>(i));
      KVSWAP_RETURN_IF_ERROR(
          context_.space->compute().upload(there, page, context_.plan.group_bytes));
      page = there;
    }
    const int64_t first = load.group * group_tokens;
    const uint64_t counted =
        batch_.validity(sequence).mask(first, group_tokens) & ~retained.mask(first, group_tokens);
    const int64_t more =
        context_.selector->summaries().bytes_to_rewrite(layer, sequence, load.group);
    KVSWAP_RETURN_IF_ERROR(context_.ledger.charge(
        Use::kSummary, more, "the summaries of sequences that retain different tokens"));
    KVSWAP_RETURN_IF_ERROR(context_.selector->rewrite({.layer = layer,
                                                       .sequence = sequence,
                                                       .keys = sealer_.keys_of(page),
                                                       .group = load.group,
                                                       .counted = counted}));
  }
  return context_.space->compute().hand_back();
}

}  // namespace kvswap
