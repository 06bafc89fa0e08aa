#include <algorithm>
#include <chrono>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "io/fault_injection.h"
#include "io/readers.h"
#include "io/test_files.h"
#include "store/record_store.h"

namespace kvswap {
namespace {

constexpr int64_t kPayload = 700;
constexpr int64_t kRecord = 1024;

/// Takes its time for each write.
class SlowFile final : public ForwardingFile {
 public:
  SlowFile(std::unique_ptr<DataFile> inner, std::chrono::milliseconds delay)
      : ForwardingFile(std::move(inner)), delay_(delay) {}
  Status write(int64_t offset_bytes, std::span<const std::byte> bytes) override {
    std::this_thread::sleep_for(delay_);
    return ForwardingFile::write(offset_bytes, bytes);
  }

 private:
  std::chrono::milliseconds delay_;
};

Status commit(RecordStore& store, RecordStore::StagedRun& run,
              const std::vector<int64_t>& sequences) {
  store.enter(run, sequences);
  return store.hand_over(run);
}

/// The first bytes of a record, inverted.
class Inverted final : public RecordPacking {
 public:
  int64_t payload_bytes() const override { return 300; }
  void pack(const std::byte* record, std::byte* packed) const override {
    std::transform(record, record + 300, packed, [](std::byte byte) { return ~byte; });
  }
  void unpack(const std::byte* packed, std::byte* record) const override { pack(packed, record); }
};

class RecordStoreTest : public testing::Test {
 protected:
  void open(std::chrono::milliseconds delay = {}, int64_t quota_bytes = -1) {
    store_.reset();
    auto file = must(DataFile::open({.directory = directory_.path(),
                                     .mode = IoMode::kBuffered,
                                     .quota_bytes = quota_bytes,
                                     .extend_bytes = 1 << 16}));
    file_ = std::make_unique<SlowFile>(std::move(file), delay);
    auto layout = must(SequenceLayout::create(kPayload, 512, 2));
    store_ = must(
        RecordStore::create(file_.get(), std::move(layout),
                            {.layers = 2, .payload_bytes = kPayload, .checksum = true, .seed = 99},
                            {.buffer_bytes = 8192, .buffers = 2}));
    reader_ = must(open_reader(*file_, {.kind = ReaderKind::kSync})).reader;
  }

  /// Seals one group for each of `sequences`, filled with numbers that follow from `content`.
  Status seal(int64_t layer, const std::vector<int64_t>& sequences, uint64_t content) {
    auto run = store_->stage(layer, static_cast<int64_t>(sequences.size()));
    if (!run.is_ok()) return run.status();
    for (size_t i = 0; i < sequences.size(); ++i) {
      fill_random({run.value().data() + i * kRecord, kPayload}, content + i);
    }
    return commit(*store_, run.value(), sequences);
  }

  std::vector<std::byte> read(int64_t layer, int64_t sequence, int64_t group) {
    must(store_->ensure_written(layer, sequence, group));
    AlignedBytes bytes(kRecord);
    const iovec target = {bytes.data(), kRecord};
    const BlockRead wanted = {store_->offset_bytes(layer, sequence, group), {&target, 1}};
    must(reader_->wait(must(reader_->submit({&wanted, 1}))));
    return {bytes.data(), bytes.data() + kRecord};
  }

  void expect_content(int64_t layer, int64_t sequence, int64_t group, uint64_t content) {
    const std::vector<std::byte> got = read(layer, sequence, group);
    EXPECT_TRUE(store_->verify(layer, sequence, group, got.data()));
    std::vector<std::byte> expected(kRecord);
    fill_random({expected.data(), kPayload}, content);
    EXPECT_TRUE(got == expected) << layer << " " << sequence << " " << group;
  }

  TempDirectory directory_;
  std::unique_ptr<DataFile> file_;
  std::unique_ptr<RecordStore> store_;
  std::unique_ptr<BlockReader> reader_;
};

TEST_F(RecordStoreTest, WhatWasCommittedComesBackAlsoFromASlowDisk) {
  for (const int delay : {0, 3}) {
    open(std::chrono::milliseconds(delay));
    store_->tables().set_sequences(2);
    for (uint64_t group = 0; group < 20; ++group) {
      must(seal(group % 2, {0, 1}, 100 * group));
      expect_content(group % 2, 1, group / 2, 100 * group + 1);  // while later writes wait
    }
    for (uint64_t group = 0; group < 20; ++group) {
      for (const int64_t sequence : {0, 1}) {
        expect_content(group % 2, sequence, group / 2, 100 * group + sequence);
      }
    }
    must(store_->writes().flush());
    EXPECT_EQ(store_->bytes_held(), 40 * kRecord);
    EXPECT_EQ(store_->writes().queue().bytes_written(), 40u * kRecord);
  }
}

TEST_F(RecordStoreTest, PackedRecordsAreSummedUpAsTheyStandInTheFile) {
  open();
  auto layout = must(SequenceLayout::create(300, 512, 1));
  store_ = must(RecordStore::create(file_.get(), std::move(layout),
                                    {.layers = 1,
                                     .payload_bytes = 300,
                                     .record_bytes = kRecord,
                                     .packing = std::make_shared<Inverted>()},
                                    {.buffer_bytes = 8192, .buffers = 2}));
  EXPECT_EQ(store_->form().record_bytes, kRecord);
  EXPECT_EQ(store_->form().stored_bytes, 512);
  EXPECT_EQ(store_->run_records_max(), 8);
  store_->tables().set_sequences(1);
  must(seal(0, {0, 0, 0}, 40));
  must(seal(0, {0}, 43));
  EXPECT_EQ(store_->bytes_held(), 4 * 512);
  for (int64_t group = 0; group < 4; ++group) {
    must(store_->ensure_written(0, 0, group));
    EXPECT_EQ(store_->offset_bytes(0, 0, group), 512 * group);
    AlignedBytes bytes(512);
    const iovec target = {bytes.data(), 512};
    const BlockRead wanted = {512 * group, {&target, 1}};
    must(reader_->wait(must(reader_->submit({&wanted, 1}))));
    EXPECT_TRUE(store_->verify(0, 0, group, bytes.data()));
    std::vector<std::byte> record(kPayload), expected(512);
    fill_random(record, 40 + group);
    Inverted().pack(record.data(), expected.data());
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), bytes.data())) << group;
    bytes.data()[299] ^= std::byte{1};
    EXPECT_FALSE(store_->verify(0, 0, group, bytes.data()));
  }
}

TEST_F(RecordStoreTest, VerifyNoticesWhateverIsNotTheRecord) {
  open();
  store_->tables().set_sequences(2);
  uint64_t content = 0;
  for (int64_t group = 0; group < 3; ++group) {
    for (const int64_t layer : {0, 1}) must(seal(layer, {0, 1}, content += 10));
  }
  std::vector<std::byte> bytes = read(0, 0, 1);
  ASSERT_TRUE(store_->verify(0, 0, 1, bytes.data()));
  EXPECT_FALSE(store_->verify(1, 0, 1, bytes.data())) << "another layer";
  EXPECT_FALSE(store_->verify(0, 0, 2, bytes.data())) << "another group";
  EXPECT_FALSE(store_->verify(0, 1, 1, bytes.data())) << "another sequence";
  for (const int64_t at : {int64_t{0}, kPayload - 1, kPayload, kRecord - 1}) {
    for (int bit = 0; bit < 8; ++bit) {
      bytes[at] ^= std::byte(1 << bit);
      EXPECT_FALSE(store_->verify(0, 0, 1, bytes.data())) << at << ", bit " << bit;
      bytes[at] ^= std::byte(1 << bit);
    }
  }
  store_->truncate(0, 1);
  must(seal(0, {0, 1}, 1000));
  EXPECT_FALSE(store_->verify(0, 0, 1, bytes.data())) << "an earlier record of the same place";
}

TEST_F(RecordStoreTest, SpaceIsUsedAgainWhenTheLastTableLetsGo) {
  open();
  store_->tables().set_sequences(1);
  for (uint64_t group = 0; group < 10; ++group) must(seal(0, {0}, group));
  store_->select_sequences(std::vector<int64_t>{0, 0, 0});
  EXPECT_EQ(store_->bytes_held(), 10 * kRecord);
  EXPECT_EQ(store_->key(0, 0, 4), store_->key(0, 2, 4));
  must(seal(0, {0, 1, 2}, 50));  // from here on they differ
  EXPECT_NE(store_->key(0, 0, 10), store_->key(0, 2, 10));
  store_->select_sequences(std::vector<int64_t>{2, 1});
  EXPECT_EQ(store_->bytes_held(), 12 * kRecord);
  for (uint64_t group = 0; group < 10; ++group) expect_content(0, 1, group, group);
  expect_content(0, 0, 10, 52);
  expect_content(0, 1, 10, 51);
  int64_t allocated = 0;
  for (int turn = 0; turn < 50; ++turn) {
    if (turn == 20) allocated = file_->allocated_bytes();
    store_->truncate(0, 3);
    EXPECT_EQ(store_->bytes_held(), 3 * kRecord);
    for (uint64_t group = 3; group < 11; ++group) must(seal(0, {0, 1}, 1000 * turn + 10 * group));
    for (uint64_t group = 3; group < 11; ++group) {
      expect_content(0, 1, group, 1000 * turn + 10 * group + 1);
    }
  }
  EXPECT_EQ(file_->allocated_bytes(), allocated);
}

TEST_F(RecordStoreTest, RandomLivesEqualAModelAndKeysNeverRepeat) {
  open();
  std::mt19937 random(4);
  using Tables = std::vector<std::vector<std::vector<uint64_t>>>;  // [layers][sequences][groups]
  Tables model(2, std::vector<std::vector<uint64_t>>(2));
  store_->tables().set_sequences(2);
  std::map<RecordKey, uint64_t> content_of;
  uint64_t content = 0;
  for (int step = 0; step < 300; ++step) {
    const int64_t layer = random() % 2;
    if (const uint32_t action = random() % 10; action < 7) {
      std::vector<int64_t> sequences(model[layer].size());
      for (size_t i = 0; i < sequences.size(); ++i) sequences[i] = i;
      content += 100;
      must(seal(layer, sequences, content));
      for (size_t i = 0; i < sequences.size(); ++i) {
        model[layer][i].push_back(content + i);
        const RecordKey key = store_->key(layer, i, store_->tables().groups(layer, i) - 1);
        ASSERT_TRUE(content_of.emplace(key, content + i).second) << "a key came again";
      }
    } else if (action < 8) {
      const size_t kept = random() % (model[layer][0].size() + 1);
      store_->truncate(layer, kept);
      for (auto& table : model[layer]) table.resize(std::min(table.size(), kept));
    } else if (action < 9) {
      std::vector<int64_t> indices(1 + random() % 4);
      for (int64_t& index : indices) index = random() % model[0].size();
      store_->select_sequences(indices);
      Tables selected(2);
      for (const int64_t of : {0, 1}) {
        for (const int64_t index : indices) selected[of].push_back(model[of][index]);
      }
      model = selected;
    } else if (random() % 8 == 0) {
      store_->clear();
      store_->tables().set_sequences(2);
      model = Tables(2, std::vector<std::vector<uint64_t>>(2));
    }
    std::set<uint64_t> distinct;
    for (const int64_t of : {0, 1}) {
      for (size_t sequence = 0; sequence < model[of].size(); ++sequence) {
        const auto& table = model[of][sequence];
        ASSERT_EQ(store_->tables().groups(of, sequence), static_cast<int64_t>(table.size()));
        distinct.insert(table.begin(), table.end());
        if (table.empty()) continue;
        const size_t group = random() % table.size();
        expect_content(of, sequence, group, table[group]);
        ASSERT_EQ(content_of[store_->key(of, sequence, group)], table[group]);
      }
    }
    ASSERT_EQ(store_->bytes_held(), static_cast<int64_t>(distinct.size()) * kRecord);
    if (HasFailure()) return;
  }
}

TEST_F(RecordStoreTest, AFullQuotaRefusesTheNextRecordAndHarmsNoOther) {
  open({}, 100 * kRecord);
  store_->tables().set_sequences(2);
  uint64_t sealed = 0;
  Status status;
  while (sealed < 1000) {
    status = seal(sealed % 2, {0, 1}, 10 * sealed);
    if (!status.is_ok()) break;
    ++sealed;
  }
  EXPECT_EQ(status.code(), StatusCode::kBudget);
  EXPECT_EQ(store_->bytes_held(), 100 * kRecord) << "the quota holds records, nothing ahead";
  for (uint64_t i = 0; i < sealed; ++i) expect_content(i % 2, 1, i / 2, 10 * i + 1);
  store_->truncate(1, 10);
  must(seal(0, {0, 1}, 7));
  expect_content(0, 0, store_->tables().groups(0, 0) - 1, 7);
}

TEST_F(RecordStoreTest, AFailedWriteStaysAnErrorUntilItIsWrittenOrUnread) {
  WriteFaults faults{.fail_write = 3, .lasts = true};
  auto inner = must(DataFile::open({.directory = directory_.path()}));
  FaultyDataFile file(std::move(inner), &faults);
  auto store = must(RecordStore::create(&file, must(SequenceLayout::create(4096, 4096, 1)),
                                        {.layers = 1, .payload_bytes = 4096, .seed = 1},
                                        {.buffer_bytes = 4096, .buffers = 2}));
  store->tables().set_sequences(1);
  Status status;
  for (int i = 0; i < 10 && status.is_ok(); ++i) {
    auto run = store->stage(0, 1);
    status = run.is_ok() ? commit(*store, run.value(), {0}) : run.status();
  }
  EXPECT_EQ(status.code(), StatusCode::kStorage);
  EXPECT_TRUE(store->ensure_written(0, 0, 0).is_ok()) << "what was written may be read";
  EXPECT_EQ(store->ensure_written(0, 0, 2).code(), StatusCode::kStorage);
  EXPECT_EQ(store->writes().flush().code(), StatusCode::kStorage);
  faults.fail_write = 0;
  EXPECT_TRUE(store->writes().flush().is_ok());
  const uint64_t written = store->writes().queue().bytes_written();
  faults.fail_write = faults.writes_seen + 1;
  auto run = must(store->stage(0, 1));
  ASSERT_TRUE(commit(*store, run, {0}).is_ok());
  EXPECT_EQ(store->writes().flush().code(), StatusCode::kStorage);
  store->truncate(0, store->tables().groups(0, 0) - 1);
  EXPECT_TRUE(store->writes().flush().is_ok()) << "nobody reads it any more";
  EXPECT_EQ(store->writes().queue().bytes_written(), written);
}

}  // namespace
}  // namespace kvswap
