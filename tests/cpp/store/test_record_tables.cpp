#include <gtest/gtest.h>

#include <memory_resource>
#include <numeric>
#include <vector>

#include "store/record_registry.h"
#include "store/record_tables.h"

namespace kvswap {
namespace {

class RecordTablesTest : public testing::Test {
 protected:
  /// The next group of a sequence, at this place.
  uint32_t append(int64_t sequence, uint32_t place) {
    const uint32_t number = records_.add(place);
    tables_.append(0, sequence, number);
    return number;
  }

  std::vector<uint32_t> released_;
  RecordRegistry records_{2, std::pmr::new_delete_resource()};
  RecordTables tables_{1, records_, std::pmr::new_delete_resource(),
                       [this](uint32_t number) { released_.push_back(records_.at(number).place); }};
};

TEST_F(RecordTablesTest, ARecordIsReleasedByTheLastTableThatHoldsIt) {
  tables_.set_sequences(2);
  for (const uint32_t place : {10, 11, 12}) append(0, place);
  append(1, 20);
  tables_.select_sequences(std::vector<int64_t>{0, 0});
  EXPECT_EQ(released_, std::vector<uint32_t>{20});
  EXPECT_EQ(tables_.number(0, 0, 2), tables_.number(0, 1, 2));
  tables_.drop(0, 0, 2);
  EXPECT_EQ(released_, std::vector<uint32_t>{20}) << "the other table holds them";
  EXPECT_EQ(tables_.first_group(0, 0), 2);
  EXPECT_EQ(tables_.groups(0, 0), 3);
  tables_.drop(0, 1, 1);
  EXPECT_EQ(released_, (std::vector<uint32_t>{20, 10}));
  tables_.truncate(0, 1);
  EXPECT_EQ(released_, (std::vector<uint32_t>{20, 10, 12, 11}));
  EXPECT_EQ(tables_.first_group(0, 0), 1);
  EXPECT_EQ(tables_.groups(0, 0), 1);
  EXPECT_EQ(records_.held(), 0);
}

TEST_F(RecordTablesTest, ANumberIsGivenAgainAndASerialNever) {
  tables_.set_sequences(1);
  const uint32_t first = append(0, 5);
  const uint32_t serial = records_.at(first).serial;
  EXPECT_TRUE(records_.is_held(first, serial));
  tables_.truncate(0, 0);
  EXPECT_FALSE(records_.is_held(first, serial));
  EXPECT_EQ(append(0, 5), first);
  EXPECT_FALSE(records_.is_held(first, serial)) << "another record of the same place";
  records_.clear();
  EXPECT_EQ(records_.add(5), first);
  EXPECT_EQ(records_.at(first).serial, serial + 2);
}

TEST_F(RecordTablesTest, WhatIsHeldIsSavedInOrderAndRestored) {
  tables_.set_sequences(1);
  for (const int8_t i : {0, 1, 2, 3}) {
    const uint32_t number = append(0, 10 + i);
    records_.set_checksum(number, 100 + i);
    const int8_t note[] = {i, static_cast<int8_t>(-i)};
    records_.set_note(number, note);
  }
  tables_.drop(0, 0, 1);
  EXPECT_FALSE(records_.stand_from(12));
  EXPECT_TRUE(records_.stand_from(11));
  std::vector<uint32_t> renumbered;
  SavedTables saved;
  saved.records = records_.held_records(renumbered);
  saved.notes = records_.held_notes();
  saved.tables = {{{2, 0, 2}}};
  EXPECT_EQ(renumbered, (std::vector<uint32_t>{0, 0, 1, 2}));
  EXPECT_EQ(saved.notes, (std::vector<int8_t>{1, -1, 2, -2, 3, -3}));

  RecordRegistry records(2, std::pmr::new_delete_resource());
  RecordTables tables(1, records, std::pmr::new_delete_resource(), [](uint32_t) {});
  tables.set_sequences(1);
  records.restore(saved);
  tables.restore(saved);
  records.end_restore();
  EXPECT_EQ(records.held(), 2);
  EXPECT_EQ(records.at(tables.number(0, 0, 0)).place, 13u);
  EXPECT_EQ(records.at(tables.number(0, 0, 0)).checksum, 103u);
  EXPECT_EQ(records.at(2).holders, 2u);
  int8_t note[2];
  records.copy_note(tables.number(0, 0, 1), note);
  EXPECT_EQ(note[1], -1);
  EXPECT_EQ(records.add(99), 1u) << "the one that nobody holds";
  EXPECT_GT(records.at(1).serial, records.at(2).serial);
}

}  // namespace
}  // namespace kvswap
