#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory_resource>
#include <span>
#include <utility>
#include <vector>

#include "store/record_list.h"

namespace kvswap {

/// Which record each group of a layer and sequence is: a table of numbers, which holds its records.
/// Sequences that share a past share its records. Not thread-safe.
class RecordTables {
 public:
  /// Hears the number of a record that no table holds any more.
  using Released = std::function<void(uint32_t)>;

  /// records and memory, where the tables are kept, outlive them.
  RecordTables(int64_t layers, RecordList& records, std::pmr::memory_resource* memory,
               Released released)
      : records_(records), memory_(memory), released_(std::move(released)), tables_(layers) {}

  int64_t groups(int64_t layer, int64_t sequence) const { return table(layer, sequence).groups(); }
  /// Groups before this one have no records any more.
  int64_t first_group(int64_t layer, int64_t sequence) const {
    return tables_[layer][sequence].first;
  }
  uint32_t number(int64_t layer, int64_t sequence, int64_t group) const {
    return tables_[layer][sequence].at(group);
  }

  /// A record that was added for it becomes the next group. Which one that is.
  int64_t append(int64_t layer, int64_t sequence, uint32_t number);
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

    explicit Table(std::pmr::memory_resource* memory) : numbers(memory) {}
    Table(const Table& other, std::pmr::memory_resource* memory)
        : first(other.first), numbers(other.numbers, memory) {}
    int64_t groups() const { return first + static_cast<int64_t>(numbers.size()); }
    uint32_t at(int64_t group) const { return numbers.at(group - first); }
  };

  const Table& table(int64_t layer, int64_t sequence) const {
    return tables_.at(layer).at(sequence);
  }
  void release(uint32_t number) {
    if (records_.release(number)) released_(number);
  }

  RecordList& records_;
  std::pmr::memory_resource* memory_;
  Released released_;
  std::vector<std::vector<Table>> tables_;  // [layers][sequences]
};

}  // namespace kvswap
