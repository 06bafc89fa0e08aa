// Clusters of similar keys on disks that fail: each token stays at one place, and what is called
// again is right.

#include "cluster_lives.h"
#include "io/fault_injection.h"
#include "io/forwarding_file.h"

namespace kvswap {
namespace {

/// Bytes that nobody will read any more become others at once.
class ScribblingFile final : public ForwardingFile {
 public:
  ScribblingFile(std::unique_ptr<DataFile> inner, int64_t* scribbled)
      : ForwardingFile(std::move(inner)), scribbled_(scribbled) {}

  void discard(int64_t offset_bytes, int64_t length_bytes) override {
    auto memory = share_aligned_bytes(length_bytes, AtEnd::kLeft);
    ASSERT_TRUE(memory.is_ok());
    std::memset(memory.value().get(), 0x5a, length_bytes);
    ASSERT_TRUE(
        write(offset_bytes, {memory.value().get(), static_cast<size_t>(length_bytes)}).is_ok());
    ++*scribbled_;
  }

 private:
  int64_t* scribbled_;
};

/// A disk on which a call of some kind fails now and then, and on which places that were let go
/// hold nothing of what they held.
class BadDisk {
 public:
  void put_below(EngineOptions& options) {
    options.kv_memory_bytes = 16 << 20;  // small write buffers
    options.file_extend_bytes = 1;       // every run of records grows the file
    options.merge_gap_bytes = 0;
    options.wrap_reader = [this](std::unique_ptr<BlockReader> inner) {
      return std::make_unique<FaultyReader>(std::move(inner), &reads_);
    };
    options.wrap_file = [this](std::unique_ptr<DataFile> inner) {
      auto scribbling = std::make_unique<ScribblingFile>(std::move(inner), &scribbled_);
      return std::make_unique<FaultyDataFile>(std::move(scribbling), &writes_);
    };
  }

  /// One of the next calls: reads fail or are wrong once, writes fail until they are mended.
  void strike(int64_t kind, uint64_t nth) {
    mend();
    if (kind == 0) reads_.fail_submit = reads_.submits_seen + nth;
    if (kind == 1) reads_.fail_read = reads_.reads_seen + nth;
    if (kind == 2) reads_.flip_read = reads_.reads_seen + nth;
    if (kind == 3) writes_.fail_write = writes_.writes_seen + nth;
    if (kind == 4) writes_.tear_write = writes_.writes_seen + nth;
    if (kind == 5) writes_.fail_reserve = writes_.reserves_seen + nth;
    writes_.lasts = kind == 3;
  }
  static constexpr int64_t kKinds = 6;

  void mend() {
    reads_.fail_submit = reads_.fail_read = reads_.flip_read = 0;
    writes_.fail_write = writes_.tear_write = writes_.fail_reserve = 0;
  }
  int64_t scribbled() const { return scribbled_; }

 private:
  ReadFaults reads_;
  WriteFaults writes_;
  int64_t scribbled_ = 0;
};

using ClusteredFaults = ClusterLives;

TEST_P(ClusteredFaults, LivesOnABadDisk) {
  set_log([](const std::string&) {});
  const int64_t count = lives(2, 8);
  int refused = 0;
  int64_t scribbled = 0;
  for (int64_t seed = 1; seed <= count && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE(seed);
    BadDisk disk;
    EngineOptions options = this->options(seed % 2 ? 4 : 8);
    disk.put_below(options);
    ClusterRun run(options, seed);
    const auto strikes = [&] {
      const int64_t kind = run.run().draw(0, 2 * BadDisk::kKinds);
      const int64_t nth = run.run().draw(1, 12);
      if (kind < BadDisk::kKinds) disk.strike(kind, static_cast<uint64_t>(nth));
    };
    run.live(80, [&] { disk.mend(); }, strikes);
    refused += run.refused();
    scribbled += disk.scribbled();
  }
  set_log(nullptr);
  EXPECT_GT(refused, 2 * count);
  EXPECT_GT(scribbled, 10 * count);
}

INSTANTIATE_TEST_SUITE_P(Lives, ClusteredFaults, testing::ValuesIn(cluster_lives()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(ClusteredFault, WhatADiskRefusesIsDoneLater) {
  int64_t refused = 0, tried = 0;
  for (int64_t nth = 1; nth <= 60 && !testing::Test::HasFatalFailure(); nth += stride(5)) {
    ++tried;
    SCOPED_TRACE(nth);
    const TestDirectory directory;
    ReadFaults faults;
    EngineOptions options = cluster_options(directory.path());
    options.merge_gap_bytes = 0;
    options.wrap_reader = [&faults](std::unique_ptr<BlockReader> inner) {
      return std::make_unique<FaultyReader>(std::move(inner), &faults);
    };
    ClusterRun run(options, 5);
    run.append(2, 150);
    faults = {};
    (nth % 3 == 0 ? faults.fail_submit : faults.fail_read) = nth;
    for (int i = 0; i < 24 && !testing::Test::HasFatalFailure(); ++i) {
      run.step(2, 1, [&] { faults = {}; });
    }
    faults = {};
    for (const int64_t layer : {0, 1}) run.check_records(layer);
    refused += run.refused();
  }
  EXPECT_GT(6 * refused, 5 * tried);
}

TEST(ClusteredFault, AWriteThatFailsLeavesEachTokenAtOnePlace) {
  set_log([](const std::string&) {});
  int64_t refused = 0, tried = 0;
  for (const char* layout : {"sequence", "pools"}) {
    for (int64_t nth = 1; nth <= 40 && !testing::Test::HasFatalFailure(); nth += stride(3)) {
      ++tried;
      SCOPED_TRACE(layout + std::to_string(nth));
      const TestDirectory directory;
      WriteFaults faults;
      EngineOptions options = cluster_options(directory.path());
      options.layout = layout;
      options.kv_memory_bytes = 16 << 20;  // small write buffers
      options.file_extend_bytes = 1;       // every run of records grows the file
      options.wrap_file = [&faults](std::unique_ptr<DataFile> inner) {
        return std::make_unique<FaultyDataFile>(std::move(inner), &faults);
      };
      ClusterRun run(options, 5);
      run.append(2, 90);
      ASSERT_TRUE(run.engine().context().store->writes().flush().is_ok());
      const auto mend = [&] { faults.fail_write = faults.fail_reserve = 0; };
      faults.lasts = true;
      if (nth % 4 == 0) {
        faults.fail_reserve = faults.reserves_seen + nth / 4;
      } else {
        faults.fail_write = faults.writes_seen + nth;
      }
      run.append(2, 70, {}, mend);
      for (int i = 0; i < 16 && !testing::Test::HasFatalFailure(); ++i) run.step(2, 1, mend);
      mend();
      for (const int64_t layer : {0, 1}) run.check_records(layer);
      run.compare_contents();
      refused += run.refused();
    }
  }
  set_log(nullptr);
  EXPECT_GT(2 * refused, tried);
}

TEST(ClusteredFault, WrongBytesAreReadAgain) {
  uint64_t reread = 0, tried = 0;
  for (int64_t nth = 1; nth <= 30 && !testing::Test::HasFatalFailure(); nth += stride(3)) {
    ++tried;
    SCOPED_TRACE(nth);
    const TestDirectory directory;
    ReadFaults faults;
    EngineOptions options = cluster_options(directory.path());
    options.wrap_reader = [&faults](std::unique_ptr<BlockReader> inner) {
      return std::make_unique<FaultyReader>(std::move(inner), &faults);
    };
    ClusterRun run(options, 5);
    run.append(2, 150);
    faults = {};
    (nth % 2 == 0 ? faults.flip_read : faults.misdirect_read) = nth;
    faults.misdirect_bytes = run.engine().context().record_bytes();
    for (int i = 0; i < 12 && !testing::Test::HasFatalFailure(); ++i) run.step(2, 1);
    for (const int64_t layer : {0, 1}) run.check_records(layer);
    reread += run.engine().context().fetcher->counters().reread_records;
  }
  EXPECT_GE(6 * reread, 5 * tried);
}

}  // namespace
}  // namespace kvswap
