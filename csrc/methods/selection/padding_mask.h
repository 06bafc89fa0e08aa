#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvswap {

/// One bit per position of a sequence: does the token count, or is it padding? Not thread-safe.
///
/// A position may become padding after it came. What was made of the tokens before stays where it
/// is: the first valid position, after which sinks are placed, is the first that came valid.
class PaddingMask {
 public:
  int64_t positions() const { return positions_; }
  /// The next `count` positions; `valid` [count], or null: all valid.
  void append(int64_t count, const bool* valid);
  void truncate(int64_t positions);
  bool is_valid(int64_t position) const { return (words_[position / 64] >> (position % 64)) & 1; }
  /// Whether it was when it came.
  bool came_valid(int64_t position) const;
  /// Positions that came valid and are padding now: exactly these, rising; any others that were
  /// set so before are valid again.
  void set_later_padding(std::vector<int64_t> positions);
  const std::vector<int64_t>& later_padding() const { return later_padding_; }
  /// Bit i: position first + i is valid. Positions past the end are not. count <= 64.
  uint64_t mask(int64_t first, int64_t count) const;
  /// The first position that came valid, or positions() where there is none.
  int64_t first_valid() const { return first_valid_ < 0 ? positions_ : first_valid_; }
  /// From here on every position is valid.
  int64_t all_valid_from() const { return all_valid_from_; }
  int64_t resident_bytes() const {
    return static_cast<int64_t>(words_.capacity() + later_padding_.capacity()) * 8;
  }

 private:
  void find_bounds();

  std::vector<uint64_t> words_;
  std::vector<int64_t> later_padding_;
  int64_t positions_ = 0;
  int64_t first_valid_ = -1;
  int64_t all_valid_from_ = 0;
};

/// Bit i: bit first + i of `words`, of which the lowest comes first. Bits past the end are 0.
/// count: 1..64.
uint64_t bits_at(std::span<const uint64_t> words, int64_t first, int64_t count);

}  // namespace kvswap
