#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <random>

#include "io/read_coalescing.h"
#include "io/readers.h"
#include "test_files.h"

namespace kvswap {
namespace {

constexpr int64_t kFileBytes = 4 << 20;

struct Case {
  ReaderKind kind;
  IoMode mode;
  const char* parent;  // nullptr: TMPDIR
};

std::string case_name(const testing::TestParamInfo<Case>& info) {
  const char* kinds[] = {"auto", "uring", "threads", "sync"};
  const char* modes[] = {"auto", "direct", "buffered"};
  return std::string(kinds[static_cast<int>(info.param.kind)]) + "_" +
         modes[static_cast<int>(info.param.mode)] + (info.param.parent ? "_shm" : "_disk");
}

/// Random reads with the memory they land in.
struct RandomReads {
  RandomReads(std::mt19937_64& random, int count, int64_t unit, int64_t file_bytes) {
    const int64_t units = file_bytes / unit;
    for (int index = 0; index < count; ++index) {
      const int64_t length = 1 + static_cast<int64_t>(random() % 16);
      const int64_t first = static_cast<int64_t>(random() % static_cast<uint64_t>(units - length));
      lengths.push_back(length * unit);
      offsets.push_back(first * unit);
    }
    const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    memory = std::make_unique<AlignedBytes>(static_cast<size_t>(total));
    targets.resize(static_cast<size_t>(count));
    std::byte* next = memory->data();
    for (int index = 0; index < count; ++index) {
      // Land the parts in the reverse order, so that a wrong target shows.
      int64_t left = lengths[index];
      std::byte* end = next + left;
      while (left > 0) {
        int64_t part = (1 + static_cast<int64_t>(random() % 5)) * unit;
        part = std::min(part, left);
        end -= part;
        targets[index].push_back({end, static_cast<size_t>(part)});
        left -= part;
      }
      next += lengths[index];
    }
    for (int index = 0; index < count; ++index) {
      reads.push_back({offsets[index], targets[index]});
    }
  }

  void expect_equal(std::span<const std::byte> content) const {
    for (size_t index = 0; index < reads.size(); ++index) {
      int64_t at = offsets[index];
      for (const iovec& target : targets[index]) {
        ASSERT_EQ(std::memcmp(target.iov_base, content.data() + at, target.iov_len), 0)
            << "read " << index << " at offset " << at;
        at += static_cast<int64_t>(target.iov_len);
      }
    }
  }

  std::vector<int64_t> lengths, offsets;
  std::unique_ptr<AlignedBytes> memory;
  std::vector<std::vector<iovec>> targets;
  std::vector<BlockRead> reads;
};

class ReaderMatrix : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const char* parent = GetParam().parent;
    directory_ =
        parent ? std::make_unique<TempDirectory>(parent) : std::make_unique<TempDirectory>();
    fill_random(content_.span(), 11);
    auto file = DataFile::open(
        {.directory = directory_->path(), .mode = GetParam().mode, .extend_bytes = kFileBytes});
    if (!file.is_ok() && GetParam().mode == IoMode::kDirect) {
      GTEST_SKIP() << file.status().message();
    }
    file_ = must(std::move(file));
    must(file_->write(0, content_.span()));
    open({.kind = GetParam().kind});
  }

  void open(ReaderOptions options) {
    Result<OpenedReader> opened = open_reader(*file_, options);
    if (!opened.is_ok() && options.kind == ReaderKind::kUring) {
      GTEST_SKIP() << opened.status().message();
    }
    reader_ = std::move(must(std::move(opened)).reader);
  }

  BlockRead one_read(int64_t offset, const AlignedBytes& memory) {
    target_ = {memory.data(), memory.size()};
    return {offset, {&target_, 1}};
  }

  std::unique_ptr<TempDirectory> directory_;
  AlignedBytes content_{kFileBytes};
  std::unique_ptr<DataFile> file_;
  std::unique_ptr<BlockReader> reader_;
  iovec target_{};
};

TEST_P(ReaderMatrix, DeliversTheWrittenBytes) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 20; ++round) {
    const RandomReads reads(random, 1 + round * 3, file_->alignment_bytes(), kFileBytes);
    must(reader_->wait(must(reader_->submit(reads.reads))));
    reads.expect_equal(content_.span());
  }
  EXPECT_EQ(reader_->counters().batches, 20u);
  EXPECT_GT(reader_->counters().bytes, 0u);
}

TEST_P(ReaderMatrix, WaitsForManyTicketsInAnyOrder) {
  std::mt19937_64 random(2);
  std::vector<RandomReads> batches;
  std::vector<std::pair<Ticket, size_t>> flying;
  Ticket last = 0;
  for (size_t index = 0; index < 24; ++index) {
    batches.emplace_back(random, static_cast<int>(index % 7), file_->alignment_bytes(), kFileBytes);
    const Ticket ticket = must(reader_->submit(batches[index].reads));
    EXPECT_GT(ticket, last);
    last = ticket;
    flying.push_back({ticket, index});
  }
  std::shuffle(flying.begin(), flying.end(), random);
  for (const auto& [ticket, index] : flying) {
    must(reader_->wait(ticket));
    batches[index].expect_equal(content_.span());
  }
}

TEST_P(ReaderMatrix, TakesMoreReadsThanItsDepth) {
  open({.kind = GetParam().kind, .depth = 3, .threads = 2});
  std::mt19937_64 random(3);
  const RandomReads first(random, 300, file_->alignment_bytes(), kFileBytes);
  const RandomReads second(random, 100, file_->alignment_bytes(), kFileBytes);
  const Ticket a = must(reader_->submit(first.reads));
  const Ticket b = must(reader_->submit(second.reads));
  must(reader_->wait(b));
  must(reader_->wait(a));
  first.expect_equal(content_.span());
  second.expect_equal(content_.span());
  const ReaderCounters counters = reader_->counters();
  EXPECT_EQ(counters.reads, 400u);
  EXPECT_EQ(counters.retries, 0u);
  EXPECT_GT(counters.calls, 0u);
  EXPECT_TRUE(reader_->name() == "uring" || counters.calls == counters.reads);
}

TEST_P(ReaderMatrix, CompletesReadsThatArriveInParts) {
  const int64_t unit = file_->alignment_bytes();
  open({.kind = GetParam().kind, .depth = 5, .call_bytes_max = 2 * unit});
  std::mt19937_64 random(4);
  const RandomReads reads(random, 120, unit, kFileBytes);
  must(reader_->wait(must(reader_->submit(reads.reads))));
  reads.expect_equal(content_.span());
  EXPECT_GT(reader_->counters().retries, 0u);
}

TEST_P(ReaderMatrix, BecomesDone) {
  std::mt19937_64 random(5);
  const RandomReads reads(random, 20, file_->alignment_bytes(), kFileBytes);
  const Ticket ticket = must(reader_->submit(reads.reads));
  while (!reader_->is_done(ticket)) ::usleep(50);
  must(reader_->wait(ticket));
  reads.expect_equal(content_.span());
}

TEST_P(ReaderMatrix, EmptyBatchIsDoneAtOnce) {
  const Ticket ticket = must(reader_->submit({}));
  EXPECT_TRUE(reader_->is_done(ticket));
  must(reader_->wait(ticket));
}

TEST_P(ReaderMatrix, ReadPastTheEndIsAnErrorThatNamesThePlace) {
  const AlignedBytes memory(8192);
  const std::pair<int64_t, int64_t> cases[] = {{kFileBytes, kFileBytes},
                                               {kFileBytes - 4096, kFileBytes}};
  for (const auto& [offset, named] : cases) {
    const BlockRead read = one_read(offset, memory);
    const Status status = reader_->wait(must(reader_->submit({&read, 1})));
    EXPECT_EQ(status.code(), StatusCode::kStorage);
    EXPECT_TRUE(contains(status.message(), directory_->path())) << status.message();
    EXPECT_TRUE(contains(status.message(), std::to_string(named))) << status.message();
  }
  const BlockRead good = one_read(0, memory);
  must(reader_->wait(must(reader_->submit({&good, 1}))));
  EXPECT_EQ(std::memcmp(memory.data(), content_.data(), memory.size()), 0);
}

TEST_P(ReaderMatrix, FileTruncatedWhileInUseIsAnError) {
  const int64_t unit = file_->alignment_bytes();
  std::mt19937_64 random(6);
  const RandomReads lower(random, 20, unit, kFileBytes / 2);
  ASSERT_EQ(::ftruncate(file_->fd(), kFileBytes / 2 + 100), 0);
  const AlignedBytes memory(8192);
  const BlockRead read = one_read(kFileBytes / 2, memory);
  const Ticket bad = must(reader_->submit({&read, 1}));
  const Ticket good = must(reader_->submit(lower.reads));
  const Status status = reader_->wait(bad);
  EXPECT_EQ(status.code(), StatusCode::kStorage);
  EXPECT_TRUE(contains(status.message(), "truncated")) << status.message();
  must(reader_->wait(good));
  lower.expect_equal(content_.span());
}

TEST_P(ReaderMatrix, OneBadReadFailsItsBatchOnly) {
  const int64_t unit = file_->alignment_bytes();
  std::mt19937_64 random(7);
  for (size_t bad = 0; bad < 40; bad += 13) {
    RandomReads mixed(random, 40, unit, kFileBytes);
    const RandomReads other(random, 40, unit, kFileBytes);
    mixed.reads[bad].offset_bytes = kFileBytes + 4096 * static_cast<int64_t>(bad);
    const Ticket failing = must(reader_->submit(mixed.reads));
    const Ticket sound = must(reader_->submit(other.reads));
    must(reader_->wait(sound));
    other.expect_equal(content_.span());
    EXPECT_FALSE(reader_->wait(failing).is_ok());
  }
}

TEST_P(ReaderMatrix, ClosesWithReadsInFlight) {
  std::mt19937_64 random(8);
  for (int round = 0; round < 10; ++round) {
    const RandomReads reads(random, 200, file_->alignment_bytes(), kFileBytes);
    open({.kind = GetParam().kind, .depth = 16});
    (void)reader_->submit(reads.reads);
    (void)reader_->submit(reads.reads);
    reader_.reset();
    std::memset(reads.memory->data(), 0, reads.memory->size());
  }
}

TEST_P(ReaderMatrix, RefusesWhatCannotBeRead) {
  const AlignedBytes memory(8192);
  const auto refused = [&](const BlockRead& read) {
    const Result<Ticket> ticket = reader_->submit({&read, 1});
    EXPECT_FALSE(ticket.is_ok());
    if (!ticket.is_ok()) {
      EXPECT_EQ(ticket.status().code(), StatusCode::kInvalid);
    }
  };
  refused({0, {}});
  refused(one_read(-4096, memory));
  target_ = {memory.data(), 0};
  refused({0, {&target_, 1}});
  target_ = {nullptr, 4096};
  refused({0, {&target_, 1}});
  const std::vector<iovec> many(kTargetsMax + 1, iovec{memory.data(), 4096});
  refused({0, many});
  if (file_->is_direct()) {
    refused(one_read(100, memory));
    target_ = {memory.data() + 1, 4096};
    refused({0, {&target_, 1}});
    target_ = {memory.data(), 100};
    refused({0, {&target_, 1}});
  }
}

TEST_P(ReaderMatrix, WaitsForATicketOnce) {
  const AlignedBytes memory(4096);
  const BlockRead read = one_read(0, memory);
  const Ticket ticket = must(reader_->submit({&read, 1}));
  must(reader_->wait(ticket));
  for (const Ticket wrong : {ticket, ticket + 7, Ticket{0}}) {
    const Status status = reader_->wait(wrong);
    EXPECT_EQ(status.code(), StatusCode::kInvalid);
    EXPECT_TRUE(reader_->is_done(wrong));
  }
}

TEST_P(ReaderMatrix, TakesTheLargestVector) {
  const auto unit = static_cast<size_t>(file_->alignment_bytes());
  const AlignedBytes memory(unit * kTargetsMax);
  std::vector<iovec> targets;
  for (int index = 0; index < kTargetsMax; ++index) {
    targets.push_back({memory.data() + unit * static_cast<size_t>(index), unit});
  }
  const BlockRead read{0, targets};
  must(reader_->wait(must(reader_->submit({&read, 1}))));
  EXPECT_EQ(std::memcmp(memory.data(), content_.data(), memory.size()), 0);
}

TEST_P(ReaderMatrix, FetchesMergedNeighbours) {
  const int64_t unit = file_->alignment_bytes();
  std::mt19937_64 random(9);
  const AlignedBytes discard_buffer(static_cast<size_t>(4 * unit));
  const AlignedBytes landing(kFileBytes);
  std::vector<Placement> placements;
  for (int64_t at = 0; at + 2 * unit <= kFileBytes;) {
    placements.push_back({at, 2 * unit, landing.data() + (kFileBytes - 2 * unit - at)});
    at += 2 * unit + static_cast<int64_t>(random() % 8) * unit;
  }
  MergedReads merged;
  merged.build(placements, {.gap_bytes_max = 4 * unit, .discard_buffer = discard_buffer.data()});
  EXPECT_GT(merged.gap_bytes(), 0);
  must(reader_->wait(must(reader_->submit(merged.reads()))));
  for (const Placement& placement : placements) {
    ASSERT_EQ(std::memcmp(placement.target, content_.data() + placement.offset_bytes,
                          static_cast<size_t>(placement.length_bytes)),
              0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ReaderMatrix,
                         testing::Values(Case{ReaderKind::kSync, IoMode::kDirect, nullptr},
                                         Case{ReaderKind::kSync, IoMode::kBuffered, nullptr},
                                         Case{ReaderKind::kThreads, IoMode::kDirect, nullptr},
                                         Case{ReaderKind::kThreads, IoMode::kBuffered, nullptr},
                                         Case{ReaderKind::kUring, IoMode::kDirect, nullptr},
                                         Case{ReaderKind::kUring, IoMode::kBuffered, nullptr},
                                         Case{ReaderKind::kAuto, IoMode::kAuto, nullptr},
                                         Case{ReaderKind::kSync, IoMode::kAuto, "/dev/shm"},
                                         Case{ReaderKind::kThreads, IoMode::kAuto, "/dev/shm"},
                                         Case{ReaderKind::kUring, IoMode::kAuto, "/dev/shm"},
                                         Case{ReaderKind::kUring, IoMode::kDirect, "/dev/shm"}),
                         case_name);

TEST(OpenReader, RefusesOptionsOutOfRange) {
  const TempDirectory directory;
  const AlignedBytes content(8192);
  const auto file = file_with(directory.path(), IoMode::kAuto, content.span());
  for (const ReaderOptions& options :
       {ReaderOptions{.depth = 0}, ReaderOptions{.depth = 1025}, ReaderOptions{.threads = 0},
        ReaderOptions{.call_bytes_max = 100}, ReaderOptions{.call_bytes_max = 4097}}) {
    const Result<OpenedReader> opened = open_reader(*file, options);
    ASSERT_FALSE(opened.is_ok());
    EXPECT_EQ(opened.status().code(), StatusCode::kInvalid);
  }
}

TEST(OpenReader, AutoIsUringOrSaysWhyNot) {
  const TempDirectory directory;
  const AlignedBytes content(8192);
  const auto file = file_with(directory.path(), IoMode::kAuto, content.span());
  const OpenedReader opened = must(open_reader(*file, {}));
  if (opened.reader->name() == "uring") {
    EXPECT_EQ(opened.reason, "");
  } else {
    EXPECT_EQ(opened.reader->name(), "threads");
    EXPECT_TRUE(contains(opened.reason, "io_uring")) << opened.reason;
  }
}

/// A ring would copy on its one thread.
TEST(OpenReader, AutoIsThreadsInMemory) {
  if (!std::filesystem::is_directory("/dev/shm")) GTEST_SKIP() << "there is no /dev/shm";
  ::unsetenv("KVSWAP_IO");
  const TempDirectory directory("/dev/shm");
  const AlignedBytes content(8192);
  const auto file = file_with(directory.path(), IoMode::kAuto, content.span());
  const OpenedReader opened = must(open_reader(*file, {}));
  EXPECT_EQ(opened.reader->name(), "threads");
  EXPECT_EQ(opened.reason, "");
}

TEST(OpenReader, TwoReadersShareAFile) {
  const TempDirectory directory;
  AlignedBytes content(kFileBytes);
  fill_random(content.span(), 12);
  const auto file = file_with(directory.path(), IoMode::kAuto, content.span());
  const OpenedReader one = must(open_reader(*file, {}));
  const OpenedReader two = must(open_reader(*file, {.kind = ReaderKind::kThreads}));
  std::mt19937_64 random(13);
  const RandomReads first(random, 100, file->alignment_bytes(), kFileBytes);
  const RandomReads second(random, 100, file->alignment_bytes(), kFileBytes);
  const Ticket a = must(one.reader->submit(first.reads));
  const Ticket b = must(two.reader->submit(second.reads));
  must(one.reader->wait(a));
  must(two.reader->wait(b));
  first.expect_equal(content.span());
  second.expect_equal(content.span());
}

}  // namespace
}  // namespace kvswap
