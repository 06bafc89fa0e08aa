#include "store/paired_pool_layout.h"

#include <algorithm>
#include <bit>
#include <cstdlib>

namespace kvswap {
namespace {

uint64_t mask_of(int64_t first, int64_t count) {
  const uint64_t low = count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
  return low << first;
}

}  // namespace

bool PairedPoolLayout::Pool::is_free(int64_t first, int64_t count) const {
  return first >= 0 && first + count <= pages && (used & mask_of(first, count)) == 0;
}

int64_t PairedPoolLayout::Pool::free_at_begin() const {
  return used == 0 ? pages : std::countr_zero(used);
}

int64_t PairedPoolLayout::Pool::free_at_end() const { return pages - 64 + std::countl_zero(used); }

int64_t PairedPoolLayout::place(const PlaceArgs& args) {
  if (args.purpose != PlaceFor::kClusterPages) return groups_->place(args);
  if (!args.beside.empty()) {
    const auto stretch = stretch_of(args.beside);
    const int64_t first = stretch ? place_at_end(*stretch, args.count) : -1;
    KVSWAP_ASSERT(first >= 0);
    return use(stretch->pool, first, args.count);
  }
  if (!args.instead.empty()) {
    // What goes may stand in a file below the own one.
    if (const auto pool = find(args.instead.front()); pool != pools_.end()) {
      const int64_t page = (args.instead.front() - pool->first) / record_bytes();
      const int64_t first = place_near(pool->second, page, args.count);
      if (first >= 0) return use(pool, first, args.count);
    }
  }
  for (const int64_t offset : open_.at(args.layer)) {
    const auto pool = pools_.find(offset);
    const int64_t first = place_beside_other(pool->second, args.count);
    if (first >= 0) return use(pool, first, args.count);
  }
  const auto pool = make_pool(args.layer, args.count);
  return use(pool, is_tight_ ? 0 : 1, args.count);
}

bool PairedPoolLayout::has_room_beside(std::span<const int64_t> offsets, int64_t count) const {
  if (offsets.empty()) return true;
  const auto stretch = stretch_of(offsets);
  return stretch && (count == 0 || place_at_end(*stretch, count) >= 0);
}

void PairedPoolLayout::release(int64_t offset_bytes) {
  const auto found = find(offset_bytes);
  if (found == pools_.end()) return groups_->release(offset_bytes);
  Pool& pool = pools_.at(found->first);
  const uint64_t bit = mask_of((offset_bytes - found->first) / record_bytes(), 1);
  KVSWAP_ASSERT((pool.used & bit) != 0);
  pool.used &= ~bit;
  if (pool.used != 0) return note_room(found);
  const auto [offset, empty] = *found;
  open_.at(empty.layer).erase(offset);
  pools_.erase(found);
  for (int64_t i = 0; i < empty.pages; ++i) groups_->release(offset + i * record_bytes());
}

void PairedPoolLayout::tighten() {
  groups_->tighten();
  is_tight_ = true;
}

void PairedPoolLayout::clear() {
  pools_.clear();
  for (auto& layer : open_) layer.clear();
  groups_->clear();
  is_tight_ = false;
}

void PairedPoolLayout::each_hole(const std::function<void(int64_t, int64_t)>& hole) const {
  groups_->each_hole(hole);
  for (const auto& [offset, pool] : pools_) {
    for (int64_t page = 0; page < pool.pages; ++page) {
      if (pool.is_free(page, 1)) hole(offset + page * record_bytes(), record_bytes());
    }
  }
}

PairedPoolLayout::Pools::const_iterator PairedPoolLayout::find(int64_t offset_bytes) const {
  auto pool = pools_.upper_bound(offset_bytes);
  if (pool == pools_.begin()) return pools_.end();
  --pool;
  const int64_t end = pool->first + pool->second.pages * record_bytes();
  return offset_bytes < end ? pool : pools_.end();
}

std::optional<PairedPoolLayout::Stretch> PairedPoolLayout::stretch_of(
    std::span<const int64_t> offsets) const {
  const auto [low, high] = std::ranges::minmax(offsets);
  const auto pool = find(low);
  if (pool == pools_.end() || find(high) != pool) return std::nullopt;
  const Stretch stretch = {pool, (low - pool->first) / record_bytes(),
                           (high - pool->first) / record_bytes() + 1};
  if (stretch.end - stretch.begin != std::ssize(offsets)) return std::nullopt;
  return stretch;
}

/// Where both ends have room: the one with more of it, the pool's middle.
int64_t PairedPoolLayout::place_at_end(const Stretch& stretch, int64_t count) {
  const Pool& pool = stretch.pool->second;
  const bool fits_after = pool.is_free(stretch.end, count);
  const bool fits_before = pool.is_free(stretch.begin - count, count);
  if (!fits_before) return fits_after ? stretch.end : -1;
  if (!fits_after) return stretch.begin - count;
  int64_t more = count;
  while (pool.is_free(stretch.end, more + 1) && pool.is_free(stretch.begin - more - 1, more + 1)) {
    ++more;
  }
  return pool.is_free(stretch.end, more + 1) ? stretch.end : stretch.begin - count;
}

/// Of two that are equally near, the one nearer to an end of the pool.
int64_t PairedPoolLayout::place_near(const Pool& pool, int64_t page, int64_t count) {
  int64_t nearest = -1;
  const auto to_end = [&](int64_t first) { return std::min(first, pool.pages - first - count); };
  for (int64_t first = 0; first + count <= pool.pages; ++first) {
    if (!pool.is_free(first, count)) continue;
    const int64_t away = std::abs(first - page) - std::abs(nearest - page);
    if (nearest < 0 || away < 0 || (away == 0 && to_end(first) < to_end(nearest))) nearest = first;
  }
  return nearest;
}

int64_t PairedPoolLayout::place_beside_other(const Pool& pool, int64_t count) const {
  const int64_t needed = count + 1 + options_.slack_pages;
  if (pool.free_at_end() >= std::max(needed, pool.free_at_begin())) return pool.pages - 1 - count;
  return pool.free_at_begin() >= needed ? 1 : -1;
}

PairedPoolLayout::Pools::const_iterator PairedPoolLayout::make_pool(int64_t layer, int64_t count) {
  const int64_t pages = is_tight_ ? count : options_.pool_pages(count);
  KVSWAP_ASSERT(pages <= kPoolPagesMax);
  const int64_t offset =
      groups_->place({.layer = layer, .count = pages, .purpose = PlaceFor::kPool});
  return pools_.emplace(offset, Pool{.layer = layer, .pages = pages}).first;
}

int64_t PairedPoolLayout::use(Pools::const_iterator pool, int64_t first, int64_t count) {
  pools_.at(pool->first).used |= mask_of(first, count);
  note_room(pool);
  return pool->first + first * record_bytes();
}

void PairedPoolLayout::note_room(Pools::const_iterator pool) {
  const bool has_room = place_beside_other(pool->second, 1) >= 0;
  std::set<int64_t>& open = open_.at(pool->second.layer);
  has_room ? static_cast<void>(open.insert(pool->first))
           : static_cast<void>(open.erase(pool->first));
}

}  // namespace kvswap
