#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory_resource>
#include <span>
#include <utility>
#include <vector>

#include "store/record_registry.h"

namespace kvswap {

/// Which record each group of a layer and sequence is: a table of numbers, which holds its records.
/// Sequences that share a past share its records.
///
/// Beside it each has pages, whose records may be replaced: copies of tokens in another order.
/// Their numbers are negative, the first is -1. Not thread-safe.
class RecordTables {
 public:
  /// Hears the number of a record that no table holds any more.
  using Released = std::function<void(uint32_t)>;

  /// records and memory, where the tables are kept, outlive them.
  RecordTables(int64_t layers, RecordRegistry& records, std::pmr::memory_resource* memory,
               Released released)
      : records_(records), memory_(memory), released_(std::move(released)), tables_(layers) {}

  static constexpr uint32_t kNoRecord = ~uint32_t{0};

  int64_t groups(int64_t layer, int64_t sequence) const { return table(layer, sequence).groups(); }
  /// Groups before this one have no records any more.
  int64_t first_group(int64_t layer, int64_t sequence) const {
    return tables_[layer][sequence].first;
  }
  uint32_t number(int64_t layer, int64_t sequence, int64_t group) const {
    return tables_[layer][sequence].at(group);
  }
  bool has_page(int64_t layer, int64_t sequence, int64_t page) const {
    const Table& table = tables_[layer][sequence];
    return ~page < std::ssize(table.pages) && table.pages[~page] != kNoRecord;
  }

  /// A record that was added for it becomes the next group. Which one that is.
  int64_t append(int64_t layer, int64_t sequence, uint32_t number);
  /// The page has this record now, which was added for it; kNoRecord: none. Releases the one that
  /// it had.
  void set_page(int64_t layer, int64_t sequence, int64_t page, uint32_t number);
  /// A record that was added, and that no table got.
  void give_up(uint32_t number) { release(number); }
  /// Releases the records of groups before `end`, for good.
  void drop(int64_t layer, int64_t sequence, int64_t end);
  /// Releases the groups from `groups` on, of all sequences.
  void truncate(int64_t layer, int64_t groups);
  /// So many empty tables a layer, where there are none.
  void set_sequences(int64_t sequences);
  /// Table i of the new batch shares the records of table indices[i] of the old one.
  void select_sequences(std::span<const int64_t> indices);
  /// Forgets all tables; nobody hears of their records.
  void clear();
  /// Fills tables that are empty, of records that are listed.
  void restore(const SavedTables& saved);

  /// For one more group.
  static constexpr int64_t bytes_per_group() { return sizeof(uint32_t); }

 private:
  /// Of one layer and sequence.
  struct Table {
    int64_t first = 0;
    // A deque grows without the copy (and the doubled memory) of a vector.
    std::pmr::deque<uint32_t> numbers;  // [groups - first]
    std::pmr::deque<uint32_t> pages;    // of page -1, -2, ...

    explicit Table(std::pmr::memory_resource* memory) : numbers(memory), pages(memory) {}
    Table(const Table& other, std::pmr::memory_resource* memory)
        : first(other.first), numbers(other.numbers, memory), pages(other.pages, memory) {}
    int64_t groups() const { return first + static_cast<int64_t>(numbers.size()); }
    uint32_t at(int64_t group) const {
      return group < 0 ? pages.at(~group) : numbers.at(group - first);
    }
  };

  const Table& table(int64_t layer, int64_t sequence) const {
    return tables_.at(layer).at(sequence);
  }
  void release(uint32_t number) {
    if (number == kNoRecord) return;
    if (records_.release(number)) released_(number);
  }

  RecordRegistry& records_;
  std::pmr::memory_resource* memory_;
  Released released_;
  std::vector<std::vector<Table>> tables_;  // [layers][sequences]
};

}  // namespace kvswap
