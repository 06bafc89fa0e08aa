#include "store/record_tables.h"

#include <algorithm>

#include "io/status.h"

namespace kvswap {

int64_t RecordTables::append(int64_t layer, int64_t sequence, uint32_t number) {
  Table& table = tables_.at(layer).at(sequence);
  table.numbers.push_back(number);
  return table.groups() - 1;
}

void RecordTables::set_page(int64_t layer, int64_t sequence, int64_t page, uint32_t number) {
  std::pmr::deque<uint32_t>& pages = tables_.at(layer).at(sequence).pages;
  if (~page >= std::ssize(pages)) pages.resize(~page + 1, kNoRecord);
  release(std::exchange(pages[~page], number));
}

void RecordTables::drop(int64_t layer, int64_t sequence, int64_t end) {
  Table& table = tables_.at(layer).at(sequence);
  KVSWAP_ASSERT(end <= table.groups());
  for (; table.first < end; ++table.first) {
    release(table.numbers.front());
    table.numbers.pop_front();
  }
}

void RecordTables::truncate(int64_t layer, int64_t groups) {
  for (Table& table : tables_.at(layer)) {
    while (!table.numbers.empty() && table.groups() > groups) {
      release(table.numbers.back());
      table.numbers.pop_back();
    }
    table.first = std::min(table.first, groups);
  }
}

void RecordTables::set_sequences(int64_t sequences) {
  for (auto& layer : tables_) {
    KVSWAP_ASSERT(layer.empty());
    layer.reserve(sequences);
    for (int64_t i = 0; i < sequences; ++i) layer.emplace_back(memory_);
  }
}

void RecordTables::select_sequences(std::span<const int64_t> indices) {
  for (auto& layer : tables_) {
    std::vector<Table> selected;
    selected.reserve(indices.size());
    for (const int64_t index : indices) {
      selected.emplace_back(layer.at(index), memory_);
      for (const uint32_t shared : selected.back().numbers) records_.hold(shared);
      for (const uint32_t shared : selected.back().pages) {
        if (shared != kNoRecord) records_.hold(shared);
      }
    }
    for (const Table& table : layer) {
      for (const uint32_t number : table.numbers) release(number);
      for (const uint32_t number : table.pages) release(number);
    }
    layer = std::move(selected);
  }
}

void RecordTables::clear() {
  for (auto& layer : tables_) layer.clear();
}

void RecordTables::restore(const SavedTables& saved) {
  KVSWAP_ASSERT(saved.tables.size() == tables_.size());
  for (size_t layer = 0; layer < tables_.size(); ++layer) {
    for (size_t sequence = 0; sequence < tables_[layer].size(); ++sequence) {
      for (const uint32_t number : saved.tables[layer].at(sequence)) {
        tables_[layer][sequence].numbers.push_back(number);
        records_.hold(number);
      }
      if (saved.pages.empty()) continue;
      for (const auto& [id, number] : saved.pages.at(layer).at(sequence)) {
        records_.hold(number);
        set_page(static_cast<int64_t>(layer), static_cast<int64_t>(sequence), id, number);
      }
    }
  }
}

}  // namespace kvswap
