// Disks that fail or lie: an error, never a wrong output, and a retry afterwards is right.

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "device/host_device.h"
#include "engine_run.h"
#include "how_long.h"
#include "io/fault_injection.h"

namespace kvswap {
namespace {

EngineOptions with_read_faults(const std::string& directory, ReadFaults* faults) {
  EngineOptions options = small_options(directory);
  options.tail_tokens = 4;
  options.head_dim = 64;
  options.merge_gap_bytes = 0;
  options.merge_bytes_max = 4096;  // one read a record
  options.wrap_reader = [faults](std::unique_ptr<BlockReader> inner) {
    return std::make_unique<FaultyReader>(std::move(inner), faults);
  };
  options.look_ahead = "trust";  // a prefetch that fails would be dropped
  return options;
}

/// Decodes while the reader obeys `faults`; every attend() that fails is tried again without.
void decode_through_faults(EngineRun& run, ReadFaults& faults, StatusCode expected,
                           int64_t* failures) {
  for (int64_t step = 0; step < 6; ++step) {
    const std::vector<float> ahead = run.draw_query(2, 1);
    const Status planned = run.ask(0, ahead, 1);
    if (planned.is_ok()) run.memory().layer(0).asked.push_back(ahead);
    if (!planned.is_ok()) ++*failures;
    const Tokens drawn = run.draw_tokens(2, 1);
    run.memory().append(0, 2, drawn);
    ASSERT_TRUE(run.give(0, drawn, 2).is_ok());
    const std::vector<float> query = run.draw_query(2, 1);
    std::vector<std::byte> output;
    Status attended = run.attend(0, query, 1, output);
    if (!attended.is_ok()) {
      ++*failures;
      ASSERT_EQ(attended.code(), expected) << attended.message();
      faults = {};
      if (!attended.is_pending()) run.memory().layer(0).asked.clear();  // else it keeps its choice
      attended = run.attend(0, query, 1, output);
    }
    ASSERT_TRUE(attended.is_ok()) << attended.message();
    run.expect_attended(0, query, 1, output);
  }
}

void prefill(EngineRun& run) {
  for (const int64_t layer : {0, 1}) {
    const Tokens drawn = run.draw_tokens(2, 150);
    run.memory().append(layer, 2, drawn);
    ASSERT_TRUE(run.give(layer, drawn, 2).is_ok());
    ASSERT_TRUE(run.set_projection(layer).is_ok());
  }
  run.compare_state();
}

enum class Place { kHost, kDevice };

class ReadFault : public testing::TestWithParam<Place> {
 protected:
  using Arm = std::function<void(EngineRun&, ReadFaults&)>;
  using Check = std::function<void(EngineRun&, int64_t failures)>;

  /// Decodes on an engine of its own through what `arm` says goes wrong.
  void decode(EngineOptions (*adapt)(EngineOptions), StatusCode expected, const Arm& arm,
              const Check& check) {
    const TestDirectory directory;
    ReadFaults faults;
    EngineOptions options = adapt(with_read_faults(directory.path(), &faults));
    if (GetParam() == Place::kDevice) options.device = host_device({});
    EngineRun run(options, 3);
    prefill(run);
    faults = {};
    arm(run, faults);
    int64_t failures = 0;
    decode_through_faults(run, faults, expected, &failures);
    if (!HasFatalFailure()) check(run, failures);
  }
  static EngineOptions as_they_are(EngineOptions options) { return options; }
};

TEST_P(ReadFault, FailsTheStepAndTheRetryIsRight) {
  int64_t failures = 0;
  for (uint64_t read = 1; read <= 40 && !HasFatalFailure(); read += stride(3)) {
    SCOPED_TRACE(read);
    decode(
        as_they_are, StatusCode::kStorage,
        [&](EngineRun&, ReadFaults& faults) { faults.fail_read = read; },
        [&](EngineRun&, int64_t failed) { failures += failed; });
  }
  EXPECT_GT(failures, lives(8, 30));
}

TEST(AuditFault, FailsTheStepAndTheRetryIsRight) {
  for (uint64_t read = 1; read <= 40 && !testing::Test::HasFatalFailure(); ++read) {
    SCOPED_TRACE(read);
    const TestDirectory directory;
    ReadFaults faults;
    EngineOptions options = with_read_faults(directory.path(), &faults);
    options.audit_every = 1;
    options.audit_groups = 3;
    EngineRun run(options, 3);
    prefill(run);
    faults = {};
    (read <= 6 ? faults.fail_submit : faults.fail_read) = read;
    int64_t failures = 0;
    decode_through_faults(run, faults, StatusCode::kStorage, &failures);
    EXPECT_EQ(failures, 1);
    EXPECT_GE(run.engine().audit().layers()[0].looks, 5);
  }
}

TEST_P(ReadFault, ABitThatFlipsOnceIsReadAgain) {
  const auto of_four_bits = [](EngineOptions options) {
    options.records = "int4";
    return options;
  };
  for (EngineOptions (*adapt)(EngineOptions) : {&as_they_are, +of_four_bits}) {
    uint64_t again = 0;
    for (uint64_t read = 1; read <= 40 && !HasFatalFailure(); read += stride(3)) {
      SCOPED_TRACE(read);
      decode(
          adapt, StatusCode::kCorrupt,
          [&](EngineRun& run, ReadFaults& faults) {
            (read % 2 == 0 ? faults.flip_read : faults.misdirect_read) = read;
            faults.misdirect_bytes = run.engine().context().stored_bytes();
          },
          [&](EngineRun& run, int64_t failed) {
            EXPECT_EQ(failed, 0);
            again += run.engine().context().fetcher->counters().reread_records;
          });
    }
    EXPECT_GT(again, static_cast<uint64_t>(lives(8, 30)));
  }
}

TEST_P(ReadFault, AnInterruptedSecondReadIsMadeUpFor) {
  int64_t failures = 0;
  for (uint64_t read = 1; read <= 40 && !HasFatalFailure(); read += stride(3)) {
    SCOPED_TRACE(read);
    decode(
        as_they_are, StatusCode::kInterrupted,
        [&](EngineRun&, ReadFaults& faults) {
          faults = {.flip_read = read, .interrupt_after_flip = true};
        },
        [&](EngineRun&, int64_t failed) { failures += failed; });
  }
  EXPECT_GT(failures, lives(8, 30));
}

TEST_P(ReadFault, ARefusedSubmitLosesNoPage) {
  const auto few_pages = [](EngineOptions options) {
    options.groups_max = options.pages_max = 4;
    return options;
  };
  for (uint64_t submit = 1; submit <= 8 && !HasFatalFailure(); ++submit) {
    SCOPED_TRACE(submit);
    decode(
        few_pages, StatusCode::kStorage,
        [&](EngineRun&, ReadFaults& faults) { faults.fail_submit = submit; },
        [&](EngineRun&, int64_t failed) { EXPECT_EQ(failed, submit <= 6 ? 1 : failed); });
  }
}

INSTANTIATE_TEST_SUITE_P(Places, ReadFault, testing::Values(Place::kHost, Place::kDevice));

struct CropOf {
  const char* name;
  std::function<void(EngineOptions&)> adapt;
  int64_t block_groups = 0;  // that are read at once; 0: as many as return
};

const CropOf kCropsOf[] = {
    {"records of the model", [](EngineOptions&) {}},
    {"blocks of four groups",
     [](EngineOptions& options) {
       options.head_dim = 256;
       options.kv_memory_bytes = 2 << 20;
     },
     4},
    {"e4m3", [](EngineOptions& options) { options.records = "fp8"; }},
    {"int4", [](EngineOptions& options) { options.records = "int4"; }},
    {"each head", [](EngineOptions& options) { options.heads = "each"; }},
    {"shared pages",
     [](EngineOptions& options) {
       options.layers = 3;
       options.ranks = {5, 8, 6};
       options.resident_layers = 2;
     }},
};

/// A crop reads twice: what fails the first time changes nothing, and what fails the second time
/// leaves a crop that must be ended.
class CropFault {
 public:
  CropFault(const CropOf& of, Place place) : of_(of), place_(place) {}

  /// Fails each read of a crop in turn.
  void run() {
    uint64_t reads = 0;
    strike(0, &reads);
    const uint64_t step = 1 + reads / lives(14, 40);
    for (uint64_t read = 1; read <= reads && !testing::Test::HasFatalFailure(); read += step) {
      SCOPED_TRACE(read);
      strike(read, &reads);
    }
    EXPECT_GT(unchanged_, 3);
    EXPECT_GT(unfinished_, 3);
  }

 private:
  static constexpr int64_t kTokens = 150;

  EngineOptions options(const std::string& directory, ReadFaults* faults) const {
    EngineOptions options = with_read_faults(directory, faults);
    options.group_tokens = 2;
    options.tail_tokens = 13;
    of_.adapt(options);
    if (place_ == Place::kDevice) options.device = host_device({});
    return options;
  }

  void fill(EngineRun& run) const {
    for (int64_t layer = 0; layer < run.engine().options().layers; ++layer) {
      run.append(layer, 2, kTokens);
      ASSERT_TRUE(run.set_projection(layer).is_ok());
    }
    run.compare_state();
  }

  /// read: that fails; 0: none does, and `reads` are counted.
  void strike(uint64_t read, uint64_t* reads) {
    const TestDirectory directory;
    ReadFaults faults;
    EngineRun run(options(directory.path(), &faults), 3);
    fill(run);
    if (of_.block_groups > 0) {
      ASSERT_EQ(2 * run.engine().context().plan.past_block_groups, of_.block_groups);
    }
    run.compare_contents();  // rounded records are those that a crop brings back
    faults = {};
    faults.fail_read = read;
    const Status cropped = run.engine().crop(77);
    if (read == 0) {
      ASSERT_TRUE(cropped.is_ok()) << cropped.message();
      *reads = faults.reads_seen;
      return;
    }
    faults = {};
    ASSERT_EQ(cropped.code(), StatusCode::kStorage) << cropped.message();
    EXPECT_EQ(run.engine().positions(0), kTokens);
    end(run);
    run.compare_contents();
    for (int step = 0; step < 3 && !testing::Test::HasFatalFailure(); ++step) run.forward(2, 2);
  }

  /// By a crop to as many positions or fewer, or by a reset.
  void end(EngineRun& run) {
    const Status other = run.engine().begin_pass(Pass::kDecode);
    if (other.is_ok()) {
      ++unchanged_;
      run.compare_contents();
    } else {
      ++unfinished_;
      EXPECT_EQ(other.code(), StatusCode::kStorage);
      EXPECT_EQ(other.error_number(), EIO) << "the cause's";
      EXPECT_NE(other.message().find("must first be cropped to 77 positions"), std::string::npos);
      EXPECT_FALSE(run.engine().select_sequences(std::vector<int64_t>{0, 1}).is_ok());
      EXPECT_EQ(run.engine().crop(78).code(), StatusCode::kInvalid);
    }
    const int ended = unchanged_ + unfinished_;
    if (ended % 3 != 0) return run.crop(ended % 3 == 1 ? 77 : 40);
    run.reset();
    fill(run);
  }

  const CropOf& of_;
  const Place place_;
  int unchanged_ = 0;
  int unfinished_ = 0;
};

TEST_P(ReadFault, InACropChangesNothingOrIsEndedByTheNext) {
  for (const CropOf& of : kCropsOf) {
    SCOPED_TRACE(of.name);
    CropFault(of, GetParam()).run();
    if (HasFatalFailure()) return;
  }
}

TEST(ReadFaultElsewhere, LeavesCropAndProjectionAsTheyWere) {
  const TestDirectory directory;
  ReadFaults faults;
  EngineRun run(with_read_faults(directory.path(), &faults), 3);
  prefill(run);
  faults = {};
  faults.fail_read = 3;
  EXPECT_EQ(run.engine().crop(77).code(), StatusCode::kStorage);
  faults = {};
  run.compare_contents();
  run.crop(77);
  run.compare_contents();

  faults = {};
  faults.fail_read = 20;
  EXPECT_EQ(run.set_projection(1).code(), StatusCode::kStorage);
  EXPECT_FALSE(run.engine().context().selector->is_ready(1));
  faults = {};
  EXPECT_TRUE(run.engine().needs_projection(1));
  for (int step = 0; step < 10 && !testing::Test::HasFatalFailure(); ++step) run.forward(2, 2);
}

TEST(ReadFaultElsewhere, ADiskThatKeepsLyingIsReportedWithItsPlace) {
  const TestDirectory directory;
  ReadFaults faults;
  EngineRun run(with_read_faults(directory.path(), &faults), 3);
  prefill(run);
  const Tokens drawn = run.draw_tokens(2, 1);
  ASSERT_TRUE(run.give(0, drawn, 2).is_ok());
  // Wrong bytes in the file itself: every read of them is wrong.
  std::vector<std::byte> garbage(run.engine().context().file->allocated_bytes(), std::byte{7});
  const int fd = run.engine().context().file->fd();
  const void* aligned = nullptr;
  ASSERT_EQ(::posix_memalign(const_cast<void**>(&aligned), 4096, garbage.size()), 0);
  std::memcpy(const_cast<void*>(aligned), garbage.data(), garbage.size());
  ASSERT_EQ(::pwrite(fd, aligned, garbage.size(), 0), static_cast<ssize_t>(garbage.size()));
  ::free(const_cast<void*>(aligned));
  std::vector<std::byte> output;
  const std::vector<float> query = run.draw_query(2, 1);
  for (int refresh = 0; refresh < 2; ++refresh) {
    const Status attended = run.attend(0, query, 1, output);
    ASSERT_EQ(attended.code(), StatusCode::kCorrupt);
    EXPECT_NE(attended.message().find(directory.path()), std::string::npos);
    EXPECT_NE(attended.message().find("layer 0"), std::string::npos);
    EXPECT_EQ(output.front(), std::byte{0xab}) << "nothing may have been written";
  }
}

/// A file that asks before it grows and before it writes.
class AskingFile final : public ForwardingFile {
 public:
  using AttentionQuery = std::function<Status()>;
  AskingFile(std::unique_ptr<DataFile> inner, AttentionQuery may_grow, AttentionQuery may_write)
      : ForwardingFile(std::move(inner)),
        may_grow_(std::move(may_grow)),
        may_write_(std::move(may_write)) {}
  Status reserve(int64_t size_bytes) override {
    if (may_grow_) KVSWAP_RETURN_IF_ERROR(may_grow_());
    return ForwardingFile::reserve(size_bytes);
  }
  Status write(int64_t offset_bytes, std::span<const std::byte> bytes) override {
    if (may_write_) KVSWAP_RETURN_IF_ERROR(may_write_());
    return ForwardingFile::write(offset_bytes, bytes);
  }

 private:
  AttentionQuery may_grow_;
  AttentionQuery may_write_;
};

Status take_time() {
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  return Status::ok();
}

TEST(SlowDisk, IsWaitedFor) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.tail_tokens = 0;
  options.wrap_file = [](std::unique_ptr<DataFile> inner) {
    return std::make_unique<AskingFile>(std::move(inner), nullptr, take_time);
  };
  EngineRun run(options, 9);
  run.live(40, 2);
}

TEST(WriteFault, WhereverItComesIsAnErrorAndNeverAWrongOutput) {
  const TestDirectory directory;
  for (uint64_t write = 1; write <= 60; write += write < 12 ? 1 : 7) {
    SCOPED_TRACE(write);
    WriteFaults faults;
    faults.fail_write = write;
    faults.lasts = true;
    EngineOptions options = small_options(directory.path());
    options.kv_memory_bytes = 8 << 20;  // small write buffers
    options.wrap_file = [&faults](std::unique_ptr<DataFile> inner) {
      return std::make_unique<FaultyDataFile>(std::move(inner), &faults);
    };
    EngineRun run(options, 9);
    Status status = run.set_projection(0);
    for (int step = 0; step < 60 && status.is_ok(); ++step) {
      const int64_t tokens = step % 3 == 0 ? 30 : 1;
      const Tokens drawn = run.draw_tokens(2, tokens);
      status = run.give(0, drawn, 2);
      if (!status.is_ok()) break;
      run.memory().append(0, 2, drawn);
      if (tokens > 1) continue;
      const std::vector<float> query = run.draw_query(2, 1);
      std::vector<std::byte> output;
      status = run.attend(0, query, 1, output);
      if (status.is_ok()) run.expect_attended(0, query, 1, output);
    }
    ASSERT_EQ(status.code(), StatusCode::kStorage) << status.message();
    EXPECT_EQ(status.error_number(), ENOSPC);
    // Until the disk takes writes again, no more is accepted than the write buffers hold; then
    // nothing has been lost.
    Tokens refused = run.draw_tokens(2, 30);
    for (int more = 0; more < 100; ++more) {
      status = run.give(0, refused, 2);
      if (!status.is_ok()) break;
      run.memory().append(0, 2, refused);
      refused = run.draw_tokens(2, 30);
    }
    ASSERT_EQ(status.code(), StatusCode::kStorage) << status.message();
    faults.fail_write = 0;
    if (write % 2 == 0) {
      run.compare_contents();
      const Status again = run.give(0, refused, 2);
      ASSERT_TRUE(again.is_ok()) << again.message();
      run.memory().append(0, 2, refused);
      run.compare_contents();
    }
    ASSERT_TRUE(run.engine().reset().is_ok());
    ASSERT_TRUE(run.give(0, refused, 2).is_ok());
  }
  EXPECT_TRUE(directory.is_empty());
}

/// From the `reserve`-th reservation on the disk is full, until an append() was refused.
void append_through_a_full_disk(EngineOptions options, uint64_t reserve) {
  uint64_t left = ~uint64_t{0};
  options.kv_memory_bytes = 16 << 20;  // small write buffers: several runs a chunk
  options.wrap_file = [&left](std::unique_ptr<DataFile> inner) {
    const auto may_grow = [&left] {
      if (left > 0) --left;
      return left > 0 ? Status::ok() : Status::storage("full", ENOSPC);
    };
    return std::make_unique<AskingFile>(std::move(inner), may_grow, nullptr);
  };
  EngineRun run(options, 9);
  run.forward(3, 20);
  run.forward(3, 2);
  left = reserve;
  int64_t refusals = 0;
  for (int step = 0; step < 25; ++step) {
    const Tokens drawn = run.draw_tokens(3, step % 5 == 0 ? 21 : 4);
    Status appended = run.give(0, drawn, 3);
    if (!appended.is_ok()) {
      ASSERT_EQ(appended.code(), StatusCode::kStorage);
      ++refusals;
      run.expect_context(run.engine().positions(0) + drawn.tokens);
      run.compare_state();
      run.compare_contents();
      left = ~uint64_t{0};
      appended = run.give(0, drawn, 3);
    }
    ASSERT_TRUE(appended.is_ok()) << appended.message();
    run.memory().append(0, 3, drawn);
    run.compare_state();
  }
  run.compare_contents();
  EXPECT_EQ(refusals, 1);
}

TEST(WriteFault, OfReservingLeavesTheLayerAsItWas) {
  const TestDirectory directory;
  EngineOptions small = small_options(directory.path());
  small.tail_tokens = 6;
  EngineOptions large = small_options(directory.path(), 16);
  large.head_dim = 256;  // a record fills a write buffer: the batch is sealed in several runs
  for (uint64_t reserve = 1; reserve <= 10; ++reserve) {
    SCOPED_TRACE(reserve);
    append_through_a_full_disk(small, reserve);
    append_through_a_full_disk(large, reserve);
    if (HasFatalFailure()) return;
  }
}

TEST(Fork, AChildGetsErrorsAndHarmsNothing) {
  const TestDirectory directory;
  auto run = std::make_unique<EngineRun>(small_options(directory.path()), 4);
  run->forward(2, 100);
  const std::vector<float> query = run->draw_query(2, 1);
  ASSERT_TRUE(run->ask(0, query, 1).is_ok());
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    std::vector<std::byte> output;
    const Tokens drawn = run->draw_tokens(2, 1);
    Engine& engine = run->engine();
    const bool refused = engine.append(0, run->view(drawn, 2)).code() == StatusCode::kInvalid &&
                         run->attend(0, query, 1, output).code() == StatusCode::kInvalid &&
                         engine.crop(3).code() == StatusCode::kInvalid;
    (void)engine.reset().is_ok();
    run.reset();
    ::_exit(refused ? 0 : 1);
  }
  int exit_status = -1;
  ASSERT_EQ(::waitpid(child, &exit_status, 0), child);
  EXPECT_EQ(exit_status, 0);
  run->memory().layer(0).asked.push_back(query);
  run->forward(2, 1);
  run->compare_contents();
}

TEST(End, InTheMiddleOfALookAheadLeavesNothing) {
  const TestDirectory directory;
  for (const std::string device : {"", "emmc"}) {
    EngineOptions options = small_options(directory.path());
    if (!device.empty()) options.device_model = device;
    EngineRun run(options, 4);
    run.forward(2, 200);
    for (const int64_t layer : {0, 1}) {
      ASSERT_TRUE(run.set_projection(layer).is_ok());
      const std::vector<float> query = run.draw_query(2, 2);
      ASSERT_TRUE(run.ask(layer, query, 2).is_ok());
    }
    EXPECT_TRUE(directory.is_empty());
  }
}

}  // namespace
}  // namespace kvswap
