#include "runtime/sequence_pages.h"

#include <cstring>

namespace kvswap {

Result<std::unique_ptr<SequencePages>> SequencePages::create(const EngineOptions& options,
                                                             int64_t record_bytes) {
  const int64_t pages = options.layers * options.pages_per_layer();
  auto pool = options.page_place == PagePlace::kDirect ? make_direct_page_pool(pages, record_bytes)
                                                       : make_staged_page_pool(pages, record_bytes);
  if (!pool.is_ok()) return pool.status();
  return std::unique_ptr<SequencePages>(new SequencePages(options, std::move(pool.value())));
}

SequencePages::SequencePages(const EngineOptions& options, std::unique_ptr<PagePool> pool)
    : options_(options), pool_(std::move(pool)), sinks_(options.layers) {
  maps_.reserve(options.layers);
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    maps_.emplace_back(static_cast<int32_t>(layer * options.pages_per_layer()),
                       static_cast<int32_t>(options.pages_max), options.replacement);
  }
}

int32_t SequencePages::sink_page(int64_t layer, int64_t index) const {
  KVSWAP_ASSERT(index < options_.sink_pages());
  return static_cast<int32_t>(layer * options_.pages_per_layer() + options_.pages_max + index);
}

int32_t SequencePages::tail_page(int64_t layer, int64_t group) const {
  return static_cast<int32_t>(layer * options_.pages_per_layer() + options_.pages_max +
                              options_.sink_pages() + group % options_.tail_pages());
}

void SequencePages::copy_from(SequencePages& other, int64_t record_bytes) {
  for (int64_t layer = 0; layer < options_.layers; ++layer) {
    const int64_t first = layer * options_.pages_per_layer() + options_.pages_max;
    const int64_t kept = options_.sink_pages() + options_.tail_pages();
    std::memcpy(pool_->page(static_cast<int32_t>(first)),
                other.pool_->page(static_cast<int32_t>(first)), kept * record_bytes);
  }
  sinks_ = other.sinks_;
  for (PageMap& map : maps_) map.clear();
}

void SequencePages::clear() {
  for (PageMap& map : maps_) map.clear();
  for (auto& sinks : sinks_) sinks.clear();
}

}  // namespace kvswap
