#include "engine/sequence/sequence_pages.h"

#include <numeric>
#include <utility>

namespace kvswap {
namespace {

/// Of one layer.
int64_t token_pages(const Plan& plan) {
  return plan.sink_pages + plan.tail_pages + plan.retention.pages + plan.waiting_pages;
}

/// What retained tokens of a layer take: their pages, and what RetainedTokens holds.
int64_t retained_bytes(const Plan& plan) {
  const EngineOptions& apart = plan.options;
  const RetentionPlan& retention = plan.retention;
  if (retention.pages == 0) return 0;
  const int64_t window =
      retention.kind.scored_by != ScoredBy::kAttention
          ? 0
          : apart.keep_window * apart.query_heads *
                (apart.head_dim * dtype_bytes(apart.dtype) + int64_t{sizeof(float)});
  const int64_t mass =
      retention.numbers_a_token * (kMassUnit + apart.tail_tokens) * int64_t{sizeof(float)};
  const int64_t exponents = retention.has_float8 ? retention.entries * plan.page_note_bytes : 0;
  // Where layers differ: which pages a layer has, and the order of its tokens.
  const int64_t divided = retention.has_layer_budgets
                              ? 4 * (retention.pages + retention.layer_pages + retention.tokens_max)
                              : 0;
  const int64_t before =
      retention.kind.retains_online ? 4 * retention.tokens_max : 0;  // a chunk, who was to stay
  // Positions, now and next, and groups that are whole.
  return retention.pages * plan.token_page_bytes + 4 * retention.entries +
         8 * retention.tokens_max + exponents + window + mass + divided + before;
}

}  // namespace

void SequencePages::reserve(Arena& arena, const Plan& plan, const Extent& extent) {
  const int64_t buffers = size_product({plan.page_layers, extent.batch, plan.options.pages_max});
  const int64_t partitions = size_product({plan.options.layers, extent.batch});
  arena.take(Use::kPages, size_product({buffers, plan.record_bytes}));
  arena.take(Use::kPages,
             size_product({partitions, plan.sink_pages + plan.tail_pages + plan.waiting_pages,
                           plan.token_page_bytes}));
  arena.take(Use::kRetained, size_product({partitions, retained_bytes(plan)}));
  arena.take(Use::kTables, size_product({buffers, PageMap::bytes_per_page(plan.replacement)}));
}

Result<std::unique_ptr<SequencePages>> SequencePages::create(const Plan& plan,
                                                             MemoryBackend& space) {
  const EngineOptions& options = plan.options;
  auto records = space.make_pool(plan.page_layers * options.pages_max, plan.record_bytes);
  if (!records.is_ok()) return records.status();
  auto tokens = space.make_pool(options.layers * token_pages(plan), plan.token_page_bytes);
  if (!tokens.is_ok()) return tokens.status();
  return std::unique_ptr<SequencePages>(
      new SequencePages(plan, std::move(records.value()), std::move(tokens.value()), space));
}

SequencePages::SequencePages(const Plan& plan, PagePool records, PagePool tokens,
                             MemoryBackend& space)
    : plan_(plan),
      space_(space),
      records_(std::move(records)),
      tokens_(std::move(tokens)),
      sinks_(plan.options.layers),
      retained_(plan.options.layers) {
  const auto pages = static_cast<int32_t>(plan.options.pages_max);
  maps_.reserve(plan.page_layers);
  for (int32_t layer = 0; layer < plan.page_layers; ++layer) {
    maps_.emplace_back(layer * pages, pages, plan.replacement);
  }
  free_retained();
}

/// No layer has pages of retained tokens.
void SequencePages::free_retained() {
  if (!plan_.retention.has_layer_budgets) return;
  held_.assign(plan_.options.layers, {});
  free_.resize(plan_.options.layers * plan_.retention.pages);
  std::iota(free_.rbegin(), free_.rend(), 0);
}

int64_t SequencePages::first_sink(int64_t layer) const { return layer * token_pages(plan_); }

std::byte* SequencePages::sink_page(int64_t layer, int64_t index) const {
  KVSWAP_ASSERT(index < plan_.sink_pages);
  return tokens_.page(static_cast<int32_t>(first_sink(layer) + index));
}

std::byte* SequencePages::tail_page(int64_t layer, int64_t group) const {
  return tokens_.page(
      static_cast<int32_t>(first_sink(layer) + plan_.sink_pages + group % plan_.tail_pages));
}

std::byte* SequencePages::retained_page(int64_t layer, int64_t index) const {
  if (plan_.retention.has_layer_budgets) {
    const int64_t page = held_[layer][index];
    layer = page / plan_.retention.pages;
    index = page % plan_.retention.pages;
  }
  return tokens_.page(
      static_cast<int32_t>(first_sink(layer) + plan_.sink_pages + plan_.tail_pages + index));
}

int64_t SequencePages::hold_retained(int64_t layer, int64_t tokens) {
  const int64_t wanted = (tokens + plan_.options.group_tokens - 1) / plan_.options.group_tokens;
  std::vector<int32_t>& held = held_[layer];
  while (std::ssize(held) > wanted) {
    free_.push_back(held.back());
    held.pop_back();
  }
  while (std::ssize(held) < wanted) {
    KVSWAP_ASSERT(!free_.empty());
    held.push_back(free_.back());
    free_.pop_back();
  }
  return wanted;
}

std::byte* SequencePages::retained_float8_page(int64_t layer, int64_t index) const {
  const int64_t each = plan_.retention.float8_per_token;
  return retained_page(layer, plan_.retention.pages - 1 - index / each) +
         index % each * (plan_.group_bytes / each);
}

void SequencePages::copy_from(SequencePages& other) {
  space_.compute().copy(tokens_.page(0), other.tokens_.page(0), tokens_.resident_bytes());
  sinks_ = other.sinks_;
  retained_ = other.retained_;
  held_ = other.held_;
  free_ = other.free_;
  for (PageMap& map : maps_) map.clear();
}

void SequencePages::clear() {
  for (PageMap& map : maps_) map.clear();
  for (auto& sinks : sinks_) sinks.clear();
  for (RetainedTokens& retained : retained_) retained = {};
  free_retained();
}

}  // namespace kvswap
