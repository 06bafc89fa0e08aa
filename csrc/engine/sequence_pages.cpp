#include "engine/sequence_pages.h"

namespace kvswap {

Result<std::unique_ptr<SequencePages>> SequencePages::create(const EngineOptions& options,
                                                             int64_t record_bytes,
                                                             PageSpace& space) {
  auto pool = space.make_pool(options.layers * options.pages_per_layer(), record_bytes);
  if (!pool.is_ok()) return pool.status();
  return std::unique_ptr<SequencePages>(new SequencePages(options, std::move(pool.value()), space));
}

SequencePages::SequencePages(const EngineOptions& options, PagePool pool, PageSpace& space)
    : options_(options), space_(space), pool_(std::move(pool)), sinks_(options.layers) {
  maps_.reserve(options.layers);
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    maps_.emplace_back(static_cast<int32_t>(layer * options.pages_max),
                       static_cast<int32_t>(options.pages_max), options.replacement_policy());
  }
}

int64_t SequencePages::first_sink(int64_t layer) const {
  return reuse_pages() + layer * (options_.sink_pages() + options_.tail_pages());
}

int32_t SequencePages::sink_page(int64_t layer, int64_t index) const {
  KVSWAP_ASSERT(index < options_.sink_pages());
  return static_cast<int32_t>(first_sink(layer) + index);
}

int32_t SequencePages::tail_page(int64_t layer, int64_t group) const {
  return static_cast<int32_t>(first_sink(layer) + options_.sink_pages() +
                              group % options_.tail_pages());
}

void SequencePages::copy_from(SequencePages& other, int64_t record_bytes) {
  const auto first = static_cast<int32_t>(first_sink(0));
  space_.compute().copy(pool_.page(first), other.pool_.page(first),
                        (pool_.pages() - first) * record_bytes);
  sinks_ = other.sinks_;
  for (PageMap& map : maps_) map.clear();
}

void SequencePages::clear() {
  for (PageMap& map : maps_) map.clear();
  for (auto& sinks : sinks_) sinks.clear();
}

}  // namespace kvswap
