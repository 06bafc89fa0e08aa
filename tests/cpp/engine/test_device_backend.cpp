// Every wait between streams, and of the host, that DeviceBackend needs: the stream that is waited
// for is far behind the others, so that bytes are wrong where nothing waits.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "device/host_device.h"
#include "engine/backend/device_backend.h"
#include "engine_run.h"

namespace kvswap {
namespace {

constexpr int64_t kTokens = 4;
constexpr int64_t kHeadDim = 32;
constexpr int64_t kRecordFloats = 2 * kTokens * kHeadDim;
constexpr int64_t kRecordBytes = kRecordFloats * int64_t{sizeof(float)};
using Record = std::vector<float>;  // [1 head, 2, kTokens, kHeadDim]

/// Its keys and values are all `number`, so attention over it alone gives that number.
Record record_of(float number) { return Record(kRecordFloats, number); }

class DeviceSpaceTest : public testing::Test {
 protected:
  /// slow: the stream that the others must wait for.
  void open(Stream slow) {
    EngineOptions options = small_options(".");
    options.layers = 1;
    options.query_heads = options.kv_heads = 1;
    options.head_dim = kHeadDim;
    options.ranks = {8};
    options.records = records_;
    options.replacement = replacement_;
    options.device = host_device({.slow = slow, .slow_us = 20000});
    plan_ = std::make_unique<Plan>(options, kRecordBytes);
    staging_.resize(Plan::kWriteBuffers * plan_->write_buffer_bytes);
    auto space = DeviceBackend::create(*plan_, staging_);
    ASSERT_TRUE(space.is_ok()) << space.status().message();
    space_ = std::move(space.value());
    auto pool = space_->make_pool(4, kRecordBytes);
    ASSERT_TRUE(pool.is_ok());
    pool_ = std::make_unique<PagePool>(std::move(pool.value()));
    ASSERT_TRUE(space_->reserve(1, plan_->groups_unit).is_ok());
    for (auto* each : {&tokens_, &other_tokens_}) {
      auto memory = space_->make_pool(1, kRecordBytes);
      ASSERT_TRUE(memory.is_ok());
      *each = std::make_unique<PagePool>(std::move(memory.value()));
    }
  }
  void TearDown() override {
    pool_.reset();
    tokens_.reset();
    other_tokens_.reset();
    space_.reset();
  }

  std::byte* page(int32_t index) const { return pool_->page(index); }

  /// As a read does: a record lands in a lane and is on its way to its page.
  void load(const Record& record, int32_t index) {
    Fetch fetch;
    fetch.loads.push_back({.page = index, .target = nullptr, .home = page(index)});
    ASSERT_TRUE(space_->landing().can_acquire(1));
    ASSERT_TRUE(space_->landing().acquire(fetch).is_ok());
    std::memcpy(fetch.loads[0].target, record.data(), kRecordBytes);
    ASSERT_TRUE(space_->landing().publish(fetch).is_ok());
  }

  /// Attention of one query over one page; the answer is there after finish().
  void attend(int32_t index, Record& output) {
    static constexpr uint64_t kMasks[] = {(uint64_t{1} << kTokens) - 1};
    static constexpr int32_t kPositions[] = {0};
    static constexpr int32_t kCounts[] = {1};
    static constexpr int32_t kQueryPositions[] = {kTokens};
    table_[0] = page(index);
    output.assign(kHeadDim, -1);
    PagedAttentionArgs args;
    args.query = query_.data();
    args.query_batch_stride = args.query_head_stride = args.query_token_stride = kHeadDim;
    args.output = output.data();
    args.pages = table_;
    args.masks = kMasks;
    args.positions = kPositions;
    args.page_counts = kCounts;
    args.query_positions = kQueryPositions;
    args.pages_max = 1;
    args.batch = args.heads = args.queries = 1;
    args.shape = {1, kTokens, kHeadDim, sizeof(float)};
    args.log_sum_exp = space_->compute().log_sum_exps(nullptr);
    space_->compute().attend(0, args);
    attended_ = args;
  }
  void finish() { ASSERT_TRUE(space_->finish().is_ok()); }

  /// A chunk that begins with `tokens_`: packed, and on its way to the staging buffer.
  void send_chunk() {
    space_->compute().mark_tokens();
    space_->compute().begin_chunk();
    space_->compute().copy(space_->outbox().at(run()), tokens_->page(0), kRecordBytes);
    space_->outbox().send(run(), kRecordBytes);
    space_->compute().end_chunk();
  }

  RecordStore::StagedRun run() {
    RecordStore::StagedRun run;
    run.buffer.data = reinterpret_cast<std::byte*>(staging_.data());
    run.buffer.index = 0;
    run.count = 1;
    return run;
  }
  Record staged() const {
    Record record(kRecordFloats);
    std::memcpy(record.data(), staging_.data(), kRecordBytes);
    return record;
  }
  void set(const PagePool& memory, const Record& record) {
    space_->compute().copy(memory.page(0), reinterpret_cast<const std::byte*>(record.data()),
                           kRecordBytes);
  }

  std::string records_ = "model";
  std::string replacement_ = "fifo";
  const void* table_[1] = {};
  PagedAttentionArgs attended_;  // the newest
  std::unique_ptr<Plan> plan_;
  std::vector<std::byte> staging_;
  std::unique_ptr<DeviceBackend> space_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<PagePool> tokens_, other_tokens_;
  const Record query_ = Record(kHeadDim, 1);
  const Record first_ = record_of(1);
  const Record second_ = record_of(2);
  const Record answer_ = Record(kHeadDim, 1);        // over first_
  const Record other_answer_ = Record(kHeadDim, 2);  // over second_
};

TEST_F(DeviceSpaceTest, APageIsOverwrittenAfterTheLastAttentionOverIt) {
  open(Stream::kCompute);
  Record before, after;
  load(first_, 0);
  attend(0, before);
  load(second_, 0);
  attend(0, after);
  finish();
  EXPECT_EQ(before, answer_);
  EXPECT_EQ(after, other_answer_);
}

TEST_F(DeviceSpaceTest, AttentionRunsWhenItsRecordsHaveCome) {
  open(Stream::kLoad);
  Record output;
  load(first_, 0);
  attend(0, output);
  finish();
  EXPECT_EQ(output, answer_);
}

TEST_F(DeviceSpaceTest, ALaneIsFilledAgainWhenItsCopyIsDone) {
  open(Stream::kLoad);
  Record one, other;
  load(first_, 0);
  load(second_, 1);
  attend(0, one);
  attend(1, other);
  finish();
  EXPECT_EQ(one, answer_);
  EXPECT_EQ(other, other_answer_);
}

TEST_F(DeviceSpaceTest, ARunIsSentWhenItStandsInTheOutbox) {
  open(Stream::kCompute);
  set(*tokens_, first_);
  space_->compute().copy(space_->outbox().at(run()), tokens_->page(0), kRecordBytes);
  space_->outbox().send(run(), kRecordBytes);
  finish();
  EXPECT_EQ(staged(), first_);
}

TEST_F(DeviceSpaceTest, ARunHasArrivedWhenItsBytesAreThere) {
  open(Stream::kWrite);
  set(*tokens_, first_);
  space_->compute().copy(space_->outbox().at(run()), tokens_->page(0), kRecordBytes);
  space_->outbox().send(run(), kRecordBytes);
  RecordStore::StagedRun sent = run();
  ASSERT_TRUE(space_->outbox().arrive(sent).is_ok());
  EXPECT_EQ(staged(), first_);
}

TEST_F(DeviceSpaceTest, AChunkIsPackedWhenItsTokensAreThere) {
  open(Stream::kCompute);
  set(*tokens_, first_);
  send_chunk();
  finish();
  EXPECT_EQ(staged(), first_);
}

TEST_F(DeviceSpaceTest, AChunksTokensStayUntilTheyArePacked) {
  open(Stream::kWrite);
  set(*tokens_, first_);
  send_chunk();
  set(*tokens_, second_);
  finish();
  EXPECT_EQ(staged(), first_);
}

TEST_F(DeviceSpaceTest, RoomIsMadeWhenNothingUsesTheOldOne) {
  open(Stream::kLoad);
  Record output;
  load(first_, 0);
  ASSERT_TRUE(space_->reserve(2, 1).is_ok());
  attend(0, output);
  finish();
  EXPECT_EQ(output, answer_);
}

TEST_F(DeviceSpaceTest, AnUploadIsOverWhenItReturns) {
  open(Stream::kCompute);
  Record source = first_, output;
  load(second_, 0);
  ASSERT_TRUE(space_->compute()
                  .upload(page(0), reinterpret_cast<std::byte*>(source.data()), kRecordBytes)
                  .is_ok());
  std::fill(source.begin(), source.end(), 3);
  attend(0, output);
  finish();
  EXPECT_EQ(output, answer_);
}

TEST_F(DeviceSpaceTest, AnUploadComesAfterWhatIsOnItsWayToThePage) {
  open(Stream::kLoad);
  Record output;
  load(second_, 0);
  ASSERT_TRUE(space_->compute()
                  .upload(page(0), reinterpret_cast<const std::byte*>(first_.data()), kRecordBytes)
                  .is_ok());
  attend(0, output);
  finish();
  EXPECT_EQ(output, answer_);
}

/// Records of e4m3: exponents arrive with the bytes they belong to.
class EncodedRun : public DeviceSpaceTest, public testing::WithParamInterface<Stream> {};

TEST_P(EncodedRun, HasArrivedWhenItsBytesAndExponentsAreThere) {
  records_ = "fp8";
  open(GetParam());
  RecordStore::StagedRun sent = run();
  sent.notes.assign(2, 99);
  for (const float number : {896.0f, 3.5f}) {  // 448 times 2^1, and times 2^-7
    const Record record = record_of(number);
    set(*tokens_, record);
    const void* const from[] = {tokens_->page(0)};
    void* const to[] = {space_->outbox().at(sent)};
    space_->compute().encode({.shape = {1, kTokens, kHeadDim, sizeof(float)},
                              .dtype = DType::kFloat32,
                              .from = from,
                              .to = to,
                              .exponents = space_->outbox().notes_at(sent),
                              .count = 1});
    space_->outbox().send(sent, kRecordFloats);
    ASSERT_TRUE(space_->outbox().arrive(sent).is_ok());
    EXPECT_EQ(sent.notes, std::vector<int8_t>(2, number > 448 ? 1 : -7));
    const std::vector<std::byte> encoded(staging_.begin(), staging_.begin() + kRecordFloats);
    EXPECT_EQ(encoded, std::vector<std::byte>(kRecordFloats, std::byte{0x7e}));
  }
}

INSTANTIATE_TEST_SUITE_P(Late, EncodedRun, testing::Values(Stream::kCompute, Stream::kWrite));

TEST_F(DeviceSpaceTest, WhatWasPaidIsThereWhenItIsWeighed) {
  replacement_ = "score";
  open(Stream::kCompute);
  for (const Record& record : {first_, second_}) {
    Record output;
    load(record, 0);
    attend(0, output);
    std::vector<float> received(kTokens, -1);
    ASSERT_TRUE(space_->compute().weigh({.attention = attended_, .mean = received.data()}).is_ok());
    for (const float of_token : received) EXPECT_NEAR(of_token, 1.0f / kTokens, 1e-6f);
  }
}

TEST_F(DeviceSpaceTest, PagesAreTheirsWhenUploadReturns) {
  open(Stream::kCompute);
  std::vector<float> both(2 * kRecordFloats, 1);
  std::fill(both.begin() + kRecordFloats, both.end(), 2);
  Record one, other;
  std::byte* const pages[] = {page(0), page(1)};
  ASSERT_TRUE(space_->compute()
                  .upload_pages(pages, reinterpret_cast<std::byte*>(both.data()), kRecordBytes)
                  .is_ok());
  std::fill(both.begin(), both.end(), 3);
  attend(0, one);
  attend(1, other);
  finish();
  EXPECT_EQ(one, answer_);
  EXPECT_EQ(other, other_answer_);
}

TEST_F(DeviceSpaceTest, ALookSeesWhatIsOnItsWayToThePage) {
  open(Stream::kLoad);
  load(first_, 0);
  std::vector<std::byte> room;
  const auto seen = space_->compute().map_for_host(page(0), kRecordBytes, room);
  ASSERT_TRUE(seen.is_ok());
  EXPECT_EQ(std::memcmp(seen.value(), first_.data(), kRecordBytes), 0);
}

class Download : public DeviceSpaceTest, public testing::WithParamInterface<Stream> {};

TEST_P(Download, IsOverWhenItReturns) {
  open(GetParam());
  load(first_, 0);
  Record target(kRecordFloats);
  ASSERT_TRUE(space_->compute()
                  .download(reinterpret_cast<std::byte*>(target.data()), page(0), kRecordBytes)
                  .is_ok());
  EXPECT_EQ(target, first_);
}

INSTANTIATE_TEST_SUITE_P(Late, Download, testing::Values(Stream::kCompute, Stream::kLoad));

}  // namespace
}  // namespace kvswap
