#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvswap {

/// One bit per column of a sequence: does the token count, or is it padding? Not thread-safe.
class TokenValidity {
 public:
  int64_t columns() const { return columns_; }
  /// The next `count` columns; `valid` [count], or null: all valid.
  void append(int64_t count, const bool* valid);
  void truncate(int64_t columns);
  bool is_valid(int64_t column) const { return (words_[column / 64] >> (column % 64)) & 1; }
  /// Bit i: column first + i is valid. Columns past the end are not. count <= 64.
  uint64_t mask(int64_t first, int64_t count) const;
  /// The first valid column, or columns() where there is none.
  int64_t first_valid() const { return first_valid_ < 0 ? columns_ : first_valid_; }
  /// From here on every column is valid.
  int64_t all_valid_from() const { return all_valid_from_; }
  int64_t resident_bytes() const { return static_cast<int64_t>(words_.capacity()) * 8; }

 private:
  void find_bounds();

  std::vector<uint64_t> words_;
  int64_t columns_ = 0;
  int64_t first_valid_ = -1;
  int64_t all_valid_from_ = 0;
};

/// Bit i: bit first + i of `words`, of which the lowest comes first. Bits past the end are 0.
/// count: 1..64.
uint64_t bits_at(std::span<const uint64_t> words, int64_t first, int64_t count);

}  // namespace kvswap
