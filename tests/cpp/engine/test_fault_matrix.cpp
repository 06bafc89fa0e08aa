// The fault matrix: every class of trouble below every reader, mode, place and phase. A fault ends
// in exact data or one Status, and what follows it, the disk well again, is right.
//
// With KVSWAP_FAULT_TABLE naming a file the cells are written there: make faults.

#include <cstdlib>
#include <fstream>
#include <map>
#include <string>

#include "cluster_run.h"
#include "device/host_device.h"
#include "engine_run.h"
#include "how_long.h"
#include "io/faulty_kernel.h"
#include "io/host_info.h"

namespace kvswap {
namespace {

struct FaultClass {
  const char* name;
  KernelFault fault;
};

/// One of each is struck at its 1st, 2nd, 3rd ... call.
const FaultClass kClasses[] = {
    {"read: EIO once", {.call = KernelCall::kRead, .error_number = EIO}},
    {"read: EIO for ever", {.call = KernelCall::kRead, .is_lasting = true, .error_number = EIO}},
    {"read: EAGAIN once", {.call = KernelCall::kRead, .error_number = EAGAIN}},
    {"read: EINTR once", {.call = KernelCall::kRead, .error_number = EINTR}},
    {"read: ENODEV", {.call = KernelCall::kRead, .is_lasting = true, .error_number = ENODEV}},
    {"read: short", {.call = KernelCall::kRead, .is_lasting = true, .is_short = true}},
    {"read: late", {.call = KernelCall::kRead, .is_lasting = true, .delay_us = 200}},
    {"read: reordered", {.call = KernelCall::kRead, .is_lasting = true, .reorders = true}},
    {"write: ENOSPC", {.call = KernelCall::kWrite, .is_lasting = true, .error_number = ENOSPC}},
    {"write: EIO once", {.call = KernelCall::kWrite, .error_number = EIO}},
    {"write: EIO for ever", {.call = KernelCall::kWrite, .is_lasting = true, .error_number = EIO}},
    {"write: EAGAIN once", {.call = KernelCall::kWrite, .error_number = EAGAIN}},
    {"write: EROFS", {.call = KernelCall::kWrite, .is_lasting = true, .error_number = EROFS}},
    {"write: short", {.call = KernelCall::kWrite, .is_lasting = true, .is_short = true}},
    {"write: late", {.call = KernelCall::kWrite, .is_lasting = true, .delay_us = 200}},
    {"allocate: ENOSPC",
     {.call = KernelCall::kAllocate, .is_lasting = true, .error_number = ENOSPC}},
    {"allocate: EFBIG", {.call = KernelCall::kAllocate, .is_lasting = true, .error_number = EFBIG}},
    {"allocate: EINTR once", {.call = KernelCall::kAllocate, .error_number = EINTR}},
    {"ring submit: EPERM",
     {.call = KernelCall::kRingSubmit, .is_lasting = true, .error_number = EPERM}},
    {"ring submit: EAGAIN once", {.call = KernelCall::kRingSubmit, .error_number = EAGAIN}},
};

constexpr const char* kPhases[] = {"prefill", "decode", "crop",    "reset",
                                   "close",   "turn",   "clusters"};

struct Column {
  ReaderKind reader;
  IoMode mode;
  bool is_on_device;
  std::string reader_name() const {
    const std::string readers[] = {"auto", "uring", "threads", "sync"};
    return readers[static_cast<int>(reader)];
  }
  std::string name() const {
    return reader_name() + (mode == IoMode::kDirect ? ", direct" : ", buffered") +
           (is_on_device ? ", device" : ", host");
  }
};

/// What a cell has seen, over all places where its fault struck.
struct Cell {
  int struck = 0;          // runs in which the fault was injected
  int healed = 0;          // of these, how many nobody noticed
  int refused = 0;         // ended in a Status, and went on
  bool is_absent = false;  // there is no such phase there
  std::string text() const {
    if (is_absent) return "absent";
    if (struck == 0) return "-";
    if (refused == 0) return "healed";
    return healed == 0 ? "error" : "healed or error";
  }
};

/// An engine on a disk that may fail. Whatever fails is made again, the disk well.
class Persistent {
 public:
  Persistent(const EngineOptions& options, FaultyKernel& kernel)
      : run_(options, 11), kernel_(kernel) {}

  bool was_refused() const { return was_refused_; }

 protected:
  static constexpr int64_t kBatch = 2;

  template <typename Call>
  void again(const Call& call) {
    Status status = call();
    if (!status.is_ok()) {
      was_refused_ = true;
      ASSERT_EQ(status.code(), StatusCode::kStorage) << status.message();
      ASSERT_NE(status.error_number(), 0) << status.message();
      ASSERT_FALSE(status.path().empty()) << status.message();
      kernel_.heal();
      status = call();
    }
    ASSERT_TRUE(status.is_ok()) << status.message();
  }

  EngineRun run_;
  FaultyKernel& kernel_;
  bool was_refused_ = false;
};

/// Lives through one phase, judged step by step.
class Life : public Persistent {
 public:
  using Persistent::Persistent;

  void live(const std::string& phase, const KernelFault& fault) {
    append(90);
    for (const int64_t layer : {0, 1}) {
      const Status set = run_.set_projection(layer);
      ASSERT_TRUE(set.is_ok()) << set.message();
    }
    kernel_.arm(fault);
    if (phase == "prefill") {
      append(50);
      attend_chunk(4);
    }
    if (phase == "decode") {
      for (int i = 0; i < 4; ++i) attend_chunk(1);
    }
    if (phase == "crop") {
      again([&] { return run_.engine().crop(41); });
      run_.memory().crop(41);
      again([&] { return run_.engine().select_sequences(kSwapped); });
      run_.memory().select_sequences(kSwapped);
      append(90);
    }
    if (phase == "reset") {
      append(30);
      read_ahead();
      again([&] { return run_.engine().reset(); });
      run_.memory().reset();
      append(60);
    }
    if (phase == "close") {
      append(40);
      read_ahead();
      return;
    }
    kernel_.heal();
    for (int i = 0; i < 3 && !testing::Test::HasFatalFailure(); ++i) attend_chunk(1);
    run_.compare_contents();
  }

 private:
  const std::vector<int64_t> kSwapped = {1, 0};

  void append(int64_t tokens) {
    for (const int64_t layer : {0, 1}) append_to(layer, tokens);
  }
  void append_to(int64_t layer, int64_t tokens) {
    const Tokens drawn = run_.draw_tokens(kBatch, tokens);
    again([&] { return run_.give(layer, drawn, kBatch); });
    run_.memory().append(layer, kBatch, drawn);
  }

  /// Reads that nobody will wait for.
  void read_ahead() {
    for (const int64_t layer : {0, 1}) {
      const std::vector<float> ahead = run_.draw_query(kBatch, 1);
      was_refused_ |= !run_.ask(layer, ahead, 1).is_ok();
    }
  }

  void attend_chunk(int64_t tokens) {
    for (const int64_t layer : {0, 1}) {
      const std::vector<float> ahead = run_.draw_query(kBatch, tokens);
      const Status planned = run_.ask(layer, ahead, tokens);
      was_refused_ |= !planned.is_ok();
      if (planned.is_ok()) run_.memory().layer(layer).asked.push_back(ahead);
      append_to(layer, tokens);
      const std::vector<float> query = run_.draw_query(kBatch, tokens);
      std::vector<std::byte> output;
      again([&] {
        const Status attended = run_.attend(layer, query, tokens, output);
        // What is made again is planned with the query itself.
        if (!attended.is_ok()) run_.memory().layer(layer).asked.clear();
        return attended;
      });
      if (testing::Test::HasFatalFailure()) return;
      run_.expect_attended(layer, query, tokens, output);
    }
  }
};

/// Tokens that stay in memory for what they were paid are chosen after a prompt and every few
/// steps, and read for it: beside a life without a fault.
class TurningLife : public Persistent {
 public:
  TurningLife(const EngineOptions& options, FaultyKernel& kernel)
      : Persistent(turning(options), kernel) {}

  const std::vector<std::byte>& attended() const { return attended_; }
  uint64_t refreshes() { return run_.engine().context().counters.refreshes; }

  void live(const KernelFault* fault) {
    for (const int64_t layer : {0, 1}) append(layer, 90);
    if (fault != nullptr) kernel_.arm(*fault);
    for (const int64_t layer : {0, 1}) {
      append(layer, 50);
      for (int64_t part = 0; part < kBatch; ++part)
        run_.engine().retention().observe_chunk(layer, part, window());
    }
    for (int i = 0; i < 8 && !testing::Test::HasFatalFailure(); ++i) {
      for (const int64_t layer : {0, 1}) attend(layer);
    }
  }

 private:
  static constexpr int64_t kQueryHeads = 4;
  static constexpr int64_t kWindow = 6;

  static EngineOptions turning(EngineOptions options) {
    options.rows = "box";
    options.ranks.clear();
    options.head_dim = 64;
    options.keeper = "observed";
    options.keep_tokens = 10;
    options.keep_window = kWindow;
    options.keep_interval = 5;
    return options;
  }

  void append(int64_t layer, int64_t tokens) {
    const Tokens drawn = run_.draw_tokens(kBatch, tokens);
    again([&] { return run_.give(layer, drawn, kBatch); });
  }

  RetainedTokens::Window window() {
    const std::vector<float> queries = run_.numbers(kQueryHeads * kWindow * 64, 2);
    const auto* bytes = reinterpret_cast<const std::byte*>(queries.data());
    return {.queries = {bytes, bytes + queries.size() * sizeof(float)},
            .log_sum_exp = std::vector<float>(kQueryHeads * kWindow, 8.0f),
            .count = kWindow,
            .first_position = 140 - kWindow,
            .scale = 0.1f};
  }

  void attend(int64_t layer) {
    append(layer, 1);
    const std::vector<float> query = run_.draw_query(kBatch, 1);
    std::vector<std::byte> output;
    again([&] { return run_.attend(layer, query, 1, output); });
    attended_.insert(attended_.end(), output.begin(), output.end());
  }

  std::vector<std::byte> attended_;
};

EngineOptions options_of(const Column& column, const std::string& directory) {
  EngineOptions options = small_options(directory);
  options.tail_tokens = 4;
  options.merge_gap_bytes = 0;
  options.merge_bytes_max = 4096;      // one read a record
  options.kv_memory_bytes = 16 << 20;  // small write buffers
  options.reader = column.reader_name();
  options.io_mode = column.mode == IoMode::kDirect ? "direct" : "buffered";
  options.file_extend_bytes = 1;  // every run of records grows the file
  if (column.is_on_device) options.device = host_device({});
  return options;
}

std::vector<Column> columns(const std::string& directory) {
  const bool has_uring = read_host_info().has_uring;
  const auto facts = probe_directory(directory);
  const bool has_direct = facts.is_ok() && facts.value().takes_direct;
  std::vector<Column> all;
  for (const ReaderKind reader : {ReaderKind::kUring, ReaderKind::kThreads, ReaderKind::kSync}) {
    for (const IoMode mode : {IoMode::kDirect, IoMode::kBuffered}) {
      for (const bool is_on_device : {false, true}) {
        if (reader == ReaderKind::kUring && !has_uring) continue;
        if (mode == IoMode::kDirect && !has_direct) continue;
        all.push_back({reader, mode, is_on_device});
      }
    }
  }
  return all;
}

/// Clusters that grow, split and are cropped, in one layout or the other. Whether a call was
/// refused.
bool live_in_clusters(EngineOptions options, const KernelFault& fault, FaultyKernel& kernel) {
  options = in_clusters(options);
  options.layout = fault.nth % 2 == 0 ? "pools" : "sequence";
  ClusterRun run(options, 11);
  const auto mend = [&] { kernel.heal(); };
  run.append(2, 90);
  kernel.arm(fault);
  run.append(2, 60, {}, mend);
  for (int i = 0; i < 6 && !testing::Test::HasFatalFailure(); ++i) run.step(2, 1, mend);
  run.repeat(mend, [&] { return run.engine().crop(147); });
  run.run().memory().crop(147);
  for (int i = 0; i < 6 && !testing::Test::HasFatalFailure(); ++i) run.step(2, 2, mend);
  kernel.heal();
  if (testing::Test::HasFatalFailure()) return true;
  for (const int64_t layer : {0, 1}) run.check_records(layer);
  run.run().compare_contents();
  return run.refused() > 0;
}

class FaultMatrix : public testing::TestWithParam<int> {
 protected:
  /// Whether a call was refused on the way to what is right.
  bool live(const Column& column, const std::string& phase, const KernelFault& fault,
            FaultyKernel& kernel) {
    const EngineOptions options = options_of(column, directory_.path());
    if (phase == "clusters") return live_in_clusters(options, fault, kernel);
    if (phase != "turn") {
      Life life(options, kernel);
      life.live(phase, fault);
      return life.was_refused();
    }
    if (attended_.empty()) {
      TurningLife undisturbed(options, kernel);
      undisturbed.live(nullptr);
      EXPECT_EQ(undisturbed.refreshes(), 4u * 2) << "after the prompt, and then";
      attended_ = undisturbed.attended();
    }
    TurningLife life(options, kernel);
    life.live(&fault);
    EXPECT_TRUE(life.attended() == attended_);
    return life.was_refused();
  }

  const TestDirectory directory_;

 private:
  std::vector<std::byte> attended_;  // by lives without a fault, through whatever reader
};

TEST_P(FaultMatrix, EndsInExactDataOrOneError) {
  const FaultClass& fault_class = kClasses[GetParam()];
  set_log([](const std::string&) {});
  const bool is_whole = std::getenv("KVSWAP_FAULT_TABLE") != nullptr;
  const auto calls = static_cast<uint64_t>(lives(1, 2));
  int struck = 0;
  std::map<std::string, std::map<std::string, Cell>> cells;
  for (const Column& column : columns(directory_.path())) {
    // In every run of the tests one reader in each mode; all by `make faults`.
    if (!is_whole && (column.is_on_device != (column.mode == IoMode::kBuffered))) continue;
    if (fault_class.fault.call == KernelCall::kRingSubmit && column.reader != ReaderKind::kUring) {
      continue;  // they have no ring
    }
    for (const char* phase : kPhases) {
      Cell& cell = cells[column.name()][phase];
      cell.is_absent = column.is_on_device && std::string(phase) == "clusters";
      if (cell.is_absent) continue;
      for (uint64_t nth = 1; nth <= (is_whole ? 6u : calls); ++nth) {
        SCOPED_TRACE(column.name() + ", " + phase + ", call " + std::to_string(nth));
        FaultyKernel kernel;
        KernelFault fault = fault_class.fault;
        fault.nth = nth;
        const bool was_refused = live(column, phase, fault, kernel);
        if (HasFailure()) {
          for (const std::string& line : kernel.log()) ADD_FAILURE() << line;
          set_log(nullptr);
          return;
        }
        if (kernel.injected() == 0) break;
        ++struck;
        ++cell.struck;
        ++(was_refused ? cell.refused : cell.healed);
      }
    }
  }
  set_log(nullptr);
  const bool needs_ring = fault_class.fault.call == KernelCall::kRingSubmit;
  const bool can_strike = !needs_ring || read_host_info().has_uring;
  EXPECT_TRUE(struck > 0 || !can_strike) << "an empty row";
  EXPECT_TRUE(directory_.is_empty());
  if (!is_whole) return;
  std::ofstream table(std::getenv("KVSWAP_FAULT_TABLE"), std::ios::app);
  for (const auto& [column, phases] : cells) {
    table << fault_class.name << " | " << column;
    for (const char* phase : kPhases) table << " | " << phases.at(phase).text();
    table << "\n";
  }
}

INSTANTIATE_TEST_SUITE_P(Classes, FaultMatrix,
                         testing::Range(0, static_cast<int>(std::size(kClasses))),
                         [](const auto& info) {
                           std::string name = kClasses[info.param].name;
                           std::erase_if(name, [](char letter) { return !std::isalnum(letter); });
                           return name;
                         });

}  // namespace
}  // namespace kvswap
