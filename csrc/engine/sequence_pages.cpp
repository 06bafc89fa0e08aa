#include "engine/sequence_pages.h"

#include <numeric>

#include "engine/memory_need.h"

namespace kvswap {
namespace {

/// Of one layer.
int64_t token_pages(const EngineOptions& options) {
  return sink_pages(options) + tail_pages(options) + KeepPlan(options).pages +
         waiting_pages(options);
}

}  // namespace

Result<std::unique_ptr<SequencePages>> SequencePages::create(const EngineOptions& options,
                                                             int64_t record_bytes,
                                                             PageSpace& space) {
  auto records = space.make_pool(page_layers(options) * options.pages_max, record_bytes);
  if (!records.is_ok()) return records.status();
  auto tokens = space.make_pool(options.layers * token_pages(options),
                                token_page_bytes(options, record_bytes));
  if (!tokens.is_ok()) return tokens.status();
  return std::unique_ptr<SequencePages>(
      new SequencePages(options, std::move(records.value()), std::move(tokens.value()), space));
}

SequencePages::SequencePages(const EngineOptions& options, PagePool records, PagePool tokens,
                             PageSpace& space)
    : options_(options),
      keep_(options),
      space_(space),
      records_(std::move(records)),
      tokens_(std::move(tokens)),
      sinks_(options.layers),
      kept_(options.layers) {
  maps_.reserve(page_layers(options));
  for (int64_t layer = 0; layer < page_layers(options); ++layer) {
    maps_.emplace_back(static_cast<int32_t>(layer * options.pages_max),
                       static_cast<int32_t>(options.pages_max), options.replacement_policy());
  }
  free_kept();
}

/// No layer has pages of kept tokens.
void SequencePages::free_kept() {
  if (!keep_.divides_layers) return;
  held_.assign(options_.layers, {});
  free_.resize(options_.layers * keep_.pages);
  std::iota(free_.rbegin(), free_.rend(), 0);
}

int64_t SequencePages::first_sink(int64_t layer) const { return layer * token_pages(options_); }

std::byte* SequencePages::sink_page(int64_t layer, int64_t index) const {
  KVSWAP_ASSERT(index < sink_pages(options_));
  return tokens_.page(static_cast<int32_t>(first_sink(layer) + index));
}

std::byte* SequencePages::tail_page(int64_t layer, int64_t group) const {
  return tokens_.page(static_cast<int32_t>(first_sink(layer) + sink_pages(options_) +
                                           group % tail_pages(options_)));
}

std::byte* SequencePages::kept_page(int64_t layer, int64_t index) const {
  if (keep_.divides_layers) {
    const int64_t page = held_[layer][index];
    layer = page / keep_.pages;
    index = page % keep_.pages;
  }
  return tokens_.page(static_cast<int32_t>(first_sink(layer) + sink_pages(options_) +
                                           tail_pages(options_) + index));
}

int64_t SequencePages::hold_kept(int64_t layer, int64_t tokens) {
  const int64_t wanted = (tokens + options_.group_tokens - 1) / options_.group_tokens;
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

std::byte* SequencePages::kept_float8_page(int64_t layer, int64_t index) const {
  const int64_t each = keep_.float8_per_token;
  return kept_page(layer, keep_.pages - 1 - index / each) +
         index % each * (options_.group_bytes() / each);
}

std::byte* SequencePages::lend_to_crop(int64_t layer, int64_t groups) {
  if (!shares_pages(options_)) {
    if (groups > options_.pages_max) return nullptr;
    map(layer).vacate(groups);
    return first_reuse_page(layer);
  }
  // Layers cannot have the pages they share at once: each has a place of its own among them all.
  const int64_t each = tail_pages(options_);
  if (groups > each || layer >= crop_lenders(options_)) return nullptr;
  for (PageMap& shared : maps_) shared.clear();
  return records_.page(static_cast<int32_t>(layer * each));
}

void SequencePages::copy_from(SequencePages& other) {
  space_.compute().copy(tokens_.page(0), other.tokens_.page(0), tokens_.resident_bytes());
  sinks_ = other.sinks_;
  kept_ = other.kept_;
  held_ = other.held_;
  free_ = other.free_;
  for (PageMap& map : maps_) map.clear();
}

void SequencePages::clear() {
  for (PageMap& map : maps_) map.clear();
  for (auto& sinks : sinks_) sinks.clear();
  for (KeptTokens& kept : kept_) kept = {};
  free_kept();
}

}  // namespace kvswap
