#include "methods/selection/padding_mask.h"

#include <algorithm>
#include <utility>

#include "io/status.h"

namespace kvswap {

void PaddingMask::append(int64_t count, const bool* valid) {
  words_.resize((positions_ + count + 63) / 64, 0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = positions_ + i;
    if (valid == nullptr || valid[i]) {
      words_[position / 64] |= uint64_t{1} << (position % 64);
      if (first_valid_ < 0) first_valid_ = position;
    } else {
      all_valid_from_ = position + 1;
    }
  }
  positions_ += count;
}

void PaddingMask::truncate(int64_t positions) {
  KVSWAP_ASSERT(positions >= 0 && positions <= positions_);
  positions_ = positions;
  std::erase_if(later_padding_, [=](int64_t position) { return position >= positions; });
  words_.resize((positions + 63) / 64);
  if (positions % 64 != 0) words_.back() &= (uint64_t{1} << (positions % 64)) - 1;
  find_bounds();
}

void PaddingMask::find_bounds() {
  if (first_valid_ >= positions_) first_valid_ = -1;
  if (all_valid_from_ <= positions_) return;
  all_valid_from_ = positions_;
  while (all_valid_from_ > 0 && is_valid(all_valid_from_ - 1)) --all_valid_from_;
}

bool PaddingMask::came_valid(int64_t position) const {
  return is_valid(position) || std::ranges::binary_search(later_padding_, position);
}

void PaddingMask::set_later_padding(std::vector<int64_t> positions) {
  for (const int64_t position : later_padding_) {
    words_[position / 64] |= uint64_t{1} << (position % 64);
  }
  later_padding_ = std::move(positions);
  for (const int64_t position : later_padding_) {
    KVSWAP_ASSERT(position < positions_ && is_valid(position));
    words_[position / 64] &= ~(uint64_t{1} << (position % 64));
  }
  all_valid_from_ = positions_;
  while (all_valid_from_ > 0 && is_valid(all_valid_from_ - 1)) --all_valid_from_;
}

uint64_t PaddingMask::mask(int64_t first, int64_t count) const {
  return bits_at(words_, first, count);
}

uint64_t bits_at(std::span<const uint64_t> words, int64_t first, int64_t count) {
  KVSWAP_ASSERT(count > 0 && count <= 64);
  const auto held = static_cast<int64_t>(words.size());
  const int64_t word = first / 64;
  const int64_t shift = first % 64;
  uint64_t bits = word < held ? words[word] >> shift : 0;
  if (shift != 0 && word + 1 < held) bits |= words[word + 1] << (64 - shift);
  return count == 64 ? bits : bits & ((uint64_t{1} << count) - 1);
}

}  // namespace kvswap
