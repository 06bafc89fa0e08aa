// Saved engines and forks go on exactly as the one that was saved would have.

#include <gtest/gtest.h>

#include "device/host_device.h"
#include "engine_run.h"
#include "how_long.h"
#include "saved_engine.h"

namespace kvswap {
namespace {

struct Kind {
  const char* name;
  const char* summary_dtype;
  DType dtype;
  bool on_device;
};

constexpr Kind kKinds[] = {
    {"low_rank", "model", DType::kFloat32, false},
    {"low_rank_bf16", "model", DType::kBFloat16, false},
    {"low_rank_device", "model", DType::kFloat32, true},
    {"each", "model", DType::kFloat32, false},
    {"fp8", "model", DType::kFloat32, false},
    {"int4", "model", DType::kFloat32, false},
    {"int4_bf16_device", "model", DType::kBFloat16, true},
    {"narrow_values", "model", DType::kFloat32, false},
    {"narrow_values_bf16", "model", DType::kBFloat16, false},
    {"wiped", "model", DType::kFloat32, false},
    {"wiped_device", "model", DType::kFloat32, true},
};

EngineOptions options_of(const Kind& kind, const std::string& directory) {
  EngineOptions options = small_options(directory);
  options.summary_dtype = kind.summary_dtype;
  options.dtype = kind.dtype;
  options.wipe_on_close = std::string(kind.name).starts_with("wiped");
  if (kind.name == std::string("each")) {
    options.heads = "each";
    options.head_dim *= 2;
  }
  if (kind.name == std::string("fp8")) {
    options.records = "fp8";
    options.head_dim *= 4;
  }
  if (std::string(kind.name).starts_with("int4")) {
    options.records = "int4";
    options.head_dim *= 4;
  }
  if (std::string(kind.name).starts_with("narrow_values")) {
    options.value_dim = options.head_dim + 5;
    options.head_dim *= 2;
  }
  if (kind.on_device) options.device = host_device({});
  return options;
}

class SavedEngine : public testing::TestWithParam<Kind> {
 protected:
  TestDirectory directory_;
};

TEST_P(SavedEngine, OpensAsItWasAndGoesOnAsItWould) {
  const EngineOptions options = options_of(GetParam(), directory_.path());
  for (const bool may_link : {true, false}) {
    for (int64_t seed = 0; seed < lives(2, 6); ++seed) {
      SCOPED_TRACE(testing::Message() << may_link << " " << seed);
      EngineRun run(options, seed);
      run.live(12, 3);
      while (run.engine().positions(0) < 20)
        run.forward(std::max<int64_t>(1, run.engine().batch()), 30);
      SavedInMemory saved(directory_.path(), may_link);
      const Status status = run.engine().saver().save(saved);
      ASSERT_TRUE(status.is_ok()) << status.message();
      run.compare_contents();
      auto opened = saved.open(options);
      ASSERT_TRUE(opened.is_ok()) << opened.status().message();
      EXPECT_EQ(opened.value()->context().fetcher->reader().counters().bytes, 0);
      auto first = run.go_on_with(std::move(opened.value()));
      run.compare_state();
      run.compare_contents();
      run.live(15, 3);
      first.reset();
      run.live(5, 3);
    }
  }
}

TEST_P(SavedEngine, ForksGoTheirOwnWaysAlsoWhenTheFirstIsGone) {
  const EngineOptions options = options_of(GetParam(), directory_.path());
  for (int64_t seed = 0; seed < lives(2, 6); ++seed) {
    SCOPED_TRACE(seed);
    EngineRun run(options, seed);
    run.live(10, 2);
    for (int generation = 0; generation < 3; ++generation) {
      while (run.engine().positions(0) < 20)
        run.forward(std::max<int64_t>(1, run.engine().batch()), 30);
      // The first goes on as well, and does not disturb its fork.
      auto first = run.go_on_with(fork_of(run.engine()));
      ASSERT_TRUE(first->crop(first->positions(0) / 2).is_ok());
      run.compare_contents();
      if (generation == 1) first.reset();
      run.live(10, 2);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, SavedEngine, testing::ValuesIn(kKinds),
                         [](const auto& of) { return of.param.name; });

TEST(SnapshotWriter, AnswersOfRowsThatTheReferenceHasNotAreThoseOfTheOneThatWasSaved) {
  for (const std::string rows : {"box", "mass", "int8", "int4"}) {
    const bool is_box = rows == "box";
    TestDirectory directory;
    EngineOptions options = small_options(directory.path());
    if (is_box) {
      options.rows = "box";
      options.ranks = {};
    } else if (rows == "mass") {
      options.score = "mass";
    } else {
      options.summary_dtype = rows;
    }
    EngineRun run(options, 3);
    const Tokens tokens = run.draw_tokens(1, 200);
    for (int64_t layer = 0; layer < options.layers; ++layer) {
      ASSERT_TRUE(run.give(layer, tokens, 1).is_ok());
      if (!is_box) {
        ASSERT_TRUE(run.set_projection(layer).is_ok());
      }
    }
    SavedInMemory saved(directory.path());
    ASSERT_TRUE(run.engine().saver().save(saved).is_ok());
    auto opened = saved.open(options);
    ASSERT_TRUE(opened.is_ok()) << opened.status().message();
    EXPECT_TRUE(answers(run.engine(), 7) == answers(*opened.value(), 7)) << rows;
  }
}

TEST(SnapshotWriter, WritesAWayThatIsMostlyHolesAnewAndGoesOn) {
  TestDirectory directory;
  const EngineOptions options = small_options(directory.path());
  EngineRun run(options, 3);
  run.forward(1, 200);
  run.crop(60);
  SavedInMemory saved(directory.path());
  ASSERT_TRUE(run.engine().saver().save(saved).is_ok());
  EXPECT_FALSE(saved.is_linked());
  run.live(10, 2);
}

TEST(SnapshotWriter, RefusesAnEmptySessionAndOneWhoseLayersDiffer) {
  TestDirectory directory;
  const EngineOptions options = small_options(directory.path());
  EngineRun run(options, 3);
  SavedInMemory saved(directory.path());
  const Status empty = run.engine().saver().save(saved);
  EXPECT_NE(empty.message().find("must hold tokens"), std::string::npos) << empty.message();
  const Tokens tokens = run.draw_tokens(1, 20);
  ASSERT_TRUE(run.give(0, tokens, 1).is_ok());
  const Status uneven = run.engine().saver().save(saved);
  EXPECT_NE(uneven.message().find("end the forward pass"), std::string::npos) << uneven.message();
  EXPECT_FALSE(run.engine().saver().share().is_ok());
}

TEST(SnapshotWriter, TheSavedFileChangesNoMoreWhateverTheSaverDoes) {
  TestDirectory directory;
  const EngineOptions options = small_options(directory.path());
  EngineRun run(options, 3);
  run.forward(2, 120);
  SavedInMemory saved(directory.path());
  ASSERT_TRUE(run.engine().saver().save(saved).is_ok());
  ASSERT_TRUE(saved.is_linked());
  const auto bytes_of = [&] {
    std::string bytes(std::filesystem::file_size(saved.path()), '\0');
    FILE* file = std::fopen(saved.path().c_str(), "rb");
    EXPECT_EQ(std::fread(bytes.data(), 1, bytes.size(), file), bytes.size());
    std::fclose(file);
    return bytes;
  };
  const std::string before = bytes_of();
  run.crop(10);
  run.forward(2, 100);
  run.reset();
  run.forward(3, 100);
  run.compare_contents();
  EXPECT_TRUE(bytes_of() == before);
  auto opened = saved.open(options);
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  EXPECT_EQ(opened.value()->positions(0), 120);
}

TEST(SnapshotWriter, ADamagedRecordIsReportedAndNeverSavedAnew) {
  TestDirectory directory;
  const EngineOptions options = small_options(directory.path());
  EngineRun run(options, 3);
  run.forward(1, 120);
  SavedInMemory saved(directory.path());
  ASSERT_TRUE(run.engine().saver().save(saved).is_ok());
  const int fd = ::open(saved.path().c_str(), O_RDWR);
  ASSERT_EQ(::pwrite(fd, "x", 1, 100), 1);
  ::close(fd);
  auto opened = saved.open(options);
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  TestDirectory elsewhere;
  SavedInMemory again(elsewhere.path());
  EXPECT_EQ(opened.value()->saver().save(again).code(), StatusCode::kCorrupt);
}

TEST(SnapshotReader, RefusesWhatDoesNotFit) {
  TestDirectory directory;
  const EngineOptions options = small_options(directory.path());
  EngineRun run(options, 3);
  run.forward(2, 120);
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    ASSERT_TRUE(run.set_projection(layer).is_ok());
  }
  SavedInMemory saved(directory.path());
  ASSERT_TRUE(run.engine().saver().save(saved).is_ok());
  const auto whole = saved.tensors();
  for (const auto& [name, bytes] : whole) {
    SCOPED_TRACE(name);
    saved.tensors() = whole;
    saved.tensors().erase(name);
    const auto lacking = saved.open(options);
    // A layer without projections is as one that has never had any.
    if (name.find("projection.key") == std::string::npos) {
      EXPECT_FALSE(lacking.is_ok());
    }
    if (name.ends_with(".rows") || name.ends_with(".tail") || name.ends_with("_records")) continue;
    saved.tensors() = whole;
    std::fill(saved.tensors()[name].begin(), saved.tensors()[name].end(), std::byte{0xff});
    const auto wrong = saved.open(options);
    ASSERT_FALSE(wrong.is_ok());
    EXPECT_EQ(wrong.status().code(), StatusCode::kCorrupt) << wrong.status().message();
  }
}

TEST(SnapshotReader, StaysWithinTheBudgetOrSaysWhatItNeeds) {
  TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  EngineRun run(options, 3);
  run.forward(2, 400);
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    ASSERT_TRUE(run.set_projection(layer).is_ok());
  }
  SavedInMemory saved(directory.path());
  ASSERT_TRUE(run.engine().saver().save(saved).is_ok());
  auto opened = saved.open(options);
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  const int64_t need =
      memory_need(options, opened.value()->context().record_bytes(), 2, 400).total();
  EXPECT_LE(opened.value()->context().ledger.peak(), need);
  options.kv_memory_bytes = need;
  EXPECT_TRUE(saved.open(options).is_ok());
  options.kv_memory_bytes = 20000;
  EXPECT_EQ(saved.open(options).status().code(), StatusCode::kBudget);
}

}  // namespace
}  // namespace kvswap
