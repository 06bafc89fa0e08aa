// The budget, the quota and the promises about context and batch; nothing is kept of what is
// refused.

#include "device/host_device.h"
#include "engine/settings_check.h"
#include "engine_run.h"
#include "kvswap/settings_rules.h"

namespace kvswap {
namespace {

/// What a small budget must be: staging buffers follow it, down to a floor.
int64_t need(EngineOptions options, int64_t batch, int64_t context) {
  options.kv_memory_bytes = options.max_context = options.max_batch = -1;
  EngineRun probe(options, 1);
  options.kv_memory_bytes = 1 << 20;
  return memory_need(options, probe.engine().context().record_bytes(), batch, context).total();
}

TEST(Budget, AChunkThatIsPreparedAnewIsCountedOnce) {
  const TestDirectory directory;
  EngineRun run(small_options(directory.path()), 3);
  for (const int64_t layer : {0, 1}) ASSERT_TRUE(run.set_projection(layer).is_ok());
  Engine& engine = run.engine();
  const int64_t before = engine.context().ledger.total();
  ASSERT_TRUE(engine.begin_pass(Pass::kPrefill).is_ok());
  ASSERT_TRUE(engine.exact_chunks().prepare(0, 1, 400).is_ok());
  const int64_t once = engine.context().ledger.total();
  EXPECT_GT(once, before);
  for (int again = 0; again < 3; ++again) {
    ASSERT_TRUE(engine.exact_chunks().prepare(0, 1, 400).is_ok());
    EXPECT_EQ(engine.context().ledger.total(), once);
    ASSERT_TRUE(engine.begin_pass(Pass::kPrefill).is_ok());
    EXPECT_LT(engine.context().ledger.total(), once) << "it was given up";
    ASSERT_TRUE(engine.exact_chunks().prepare(0, 1, 400).is_ok());
    EXPECT_EQ(engine.context().ledger.total(), once);
  }
}

TEST(Budget, APromptThatIsTooLongLeavesTheBatchOpen) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.max_context = 50;
  options.max_batch = 4;
  EngineRun run(options, 3);
  const Tokens drawn = run.draw_tokens(4, 51);
  EXPECT_EQ(run.give(0, drawn, 4).code(), StatusCode::kBudget);
  const Status taken = run.give(0, run.draw_tokens(2, 50), 2);
  EXPECT_TRUE(taken.is_ok()) << taken.message();
}

struct Appends {
  const char* heads;
  int64_t tokens;
};

TEST(Budget, IsNeverPassedAndNothingIsRetainedOfAnAppendThatDoesNotFit) {
  const TestDirectory directory;
  for (const auto& [heads, tokens] :
       {Appends{"all", 1}, {"all", 4}, {"all", 13}, {"all", 37}, {"each", 4}, {"each", 37}}) {
    SCOPED_TRACE(std::string(heads) + " " + std::to_string(tokens));
    EngineOptions options = small_options(directory.path());
    options.heads = heads;
    if (options.heads == "each") options.head_dim *= 2;
    options.kv_memory_bytes = need(options, 2, 2500);
    EngineRun run(options, 7);
    for (const int64_t layer : {0, 1}) ASSERT_TRUE(run.set_projection(layer).is_ok());
    run.forward(2, 40);
    int64_t layer = 0;
    Status refused;
    while (run.engine().positions(0) < 8000) {
      const Tokens drawn = run.draw_tokens(2, tokens);
      refused = run.give(layer, drawn, 2);
      ASSERT_LE(run.engine().context().ledger.peak(), options.kv_memory_bytes);
      if (!refused.is_ok()) break;
      run.memory().append(layer, 2, drawn);
      layer = 1 - layer;
    }
    EXPECT_EQ(refused.code(), StatusCode::kBudget);
    EXPECT_NE(refused.message().find("kv_memory_bytes must"), std::string::npos);
    EXPECT_GE(run.engine().positions(1), 2500 - tokens) << "memory_need() promises as much";
    const int64_t total = run.engine().context().ledger.total();
    for (int again = 0; again < 3; ++again) {
      const Tokens drawn = run.draw_tokens(2, tokens);
      ASSERT_FALSE(run.give(layer, drawn, 2).is_ok());
      ASSERT_EQ(run.engine().context().ledger.total(), total);
    }
    run.compare_state();
    run.compare_contents();
    // With some room made, life goes on.
    run.crop(1000);
    run.forward(2, 3);
    run.compare_contents();
  }
}

TEST(Budget, ThatCannotHoldTheFirstAppendIsRefusedWithTheLeastThatCan) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  const int64_t least = need(options, 2, 300);
  options.kv_memory_bytes = least - 1;
  EngineRun run(options, 7);
  const Tokens drawn = run.draw_tokens(2, 300);
  const Status refused = run.give(0, drawn, 2);
  EXPECT_EQ(refused.code(), StatusCode::kBudget);
  EXPECT_NE(refused.message().find(std::to_string(least)), std::string::npos) << refused.message();
  EXPECT_EQ(run.engine().batch(), 0);
  EXPECT_EQ(run.engine().positions(0), 0);
  run.forward(1, 300);
}

TEST(Budget, PromisesAboutContextAndBatchAreCheckedAtTheStart) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.max_context = 2000;
  options.max_batch = 2;
  options.kv_memory_bytes = need(options, 2, 2000);
  {
    EngineRun run(options, 1);
    run.forward(2, 1990);
    run.forward(2, 4);
    run.forward(2, 4);
    const Tokens drawn = run.draw_tokens(2, 3);
    EXPECT_EQ(run.give(0, drawn, 2).code(), StatusCode::kBudget);
    run.forward(2, 2);
    run.compare_contents();
    run.reset();
    const Tokens wide = run.draw_tokens(3, 8);
    EXPECT_EQ(run.give(0, wide, 3).code(), StatusCode::kInvalid);
  }
  options.kv_memory_bytes -= 1;
  auto refused = Engine::create(options, nullptr);
  ASSERT_FALSE(refused.is_ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kBudget);
  EXPECT_TRUE(directory.is_empty());
}

TEST(Budget, AProjectionThatDoesNotFitLeavesTheLayerWithout) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.ranks = {16, 8};
  options.kv_memory_bytes = need(options, 1, 20) + (32 << 10);
  EngineRun run(options, 7);
  run.forward(1, 20);
  const Tokens more = run.draw_tokens(1, 1200);  // a second chunk of the summary
  ASSERT_TRUE(run.give(0, more, 1).is_ok());
  const std::vector<float> numbers(64 * 16, 1.0f);
  EXPECT_EQ(run.engine().set_projection(0, 16, numbers.data(), numbers.data()).code(),
            StatusCode::kBudget);
  EXPECT_FALSE(run.engine().context().selector->is_ready(0));
  EXPECT_EQ(run.engine().context().ledger.used(Use::kProjections), 0);
  EXPECT_EQ(run.engine().context().ledger.used(Use::kSummary), 0);
  ASSERT_TRUE(run.engine().crop(20).is_ok());
  EXPECT_TRUE(run.engine().set_projection(0, 16, numbers.data(), numbers.data()).is_ok());
}

TEST(Quota, CoversExactlyTheRecordsAndItsEndTakesNothingAway) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  {
    EngineRun probe(options, 1);
    options.disk_quota_bytes =
        options.layers * 2 * options.sealed_groups(300) * probe.engine().context().record_bytes();
  }
  EngineRun run(options, 7);
  run.forward(2, 30);
  while (run.engine().positions(0) < 296) run.forward(2, 1);
  run.forward(2, 4);
  run.compare_contents();
  Status refused;
  while (refused.is_ok()) {
    const Tokens drawn = run.draw_tokens(2, 37);
    refused = run.give(0, drawn, 2);
    if (refused.is_ok()) run.memory().append(0, 2, drawn);
  }
  EXPECT_EQ(refused.code(), StatusCode::kBudget);
  EXPECT_NE(refused.message().find("quota"), std::string::npos) << refused.message();
  run.expect_context(run.engine().positions(0) + 37);
  run.compare_state();
  run.compare_contents();
  run.crop(150);
  run.forward(2, 100);
  run.forward(2, 4);
  run.compare_contents();
}

TEST(Quota, OfLessThanThePromisedContextIsRefusedAtTheStart) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.max_context = 10000;
  options.max_batch = 1;
  options.disk_quota_bytes = 1 << 20;
  EXPECT_EQ(Engine::create(options, nullptr).status().code(), StatusCode::kBudget);
  options.disk_quota_bytes = std::nullopt;
  options.max_context = (int64_t{1} << 31) - 1;
  EXPECT_EQ(Engine::create(options, nullptr).status().code(), StatusCode::kStorage);
  for (const int64_t too_long : {int64_t{1} << 31, int64_t{1} << 62}) {
    options.max_context = too_long;
    EXPECT_EQ(Engine::create(options, nullptr).status().code(), StatusCode::kInvalid);
  }
}

TEST(CallGuard, OutOfTurnOrRangeAreRefused) {
  const TestDirectory directory;
  EngineRun run(small_options(directory.path()), 7);
  std::vector<std::byte> output;
  const std::vector<float> query = run.draw_query(2, 5);
  EXPECT_EQ(run.attend(0, query, 1, output).code(), StatusCode::kInvalid) << "before any append";
  run.forward(2, 30);
  const Tokens one = run.draw_tokens(1, 2);
  EXPECT_EQ(run.give(0, one, 1).code(), StatusCode::kInvalid);
  EXPECT_EQ(run.give(2, one, 2).code(), StatusCode::kInvalid);
  const Tokens none = {0, {}, {}};
  EXPECT_EQ(run.give(0, none, 2).code(), StatusCode::kInvalid);
  EXPECT_EQ(run.attend(0, query, 5, output).code(), StatusCode::kInvalid);
  EXPECT_EQ(run.attend(0, query, 0, output).code(), StatusCode::kInvalid);
  EXPECT_EQ(run.attend(-1, query, 1, output).code(), StatusCode::kInvalid);
  EXPECT_EQ(run.ask(2, query, 1).code(), StatusCode::kInvalid);
  EXPECT_EQ(run.engine().read_back(0, 2, 0, 1, output.data(), output.data()).code(),
            StatusCode::kInvalid);
  EXPECT_EQ(run.engine().read_back(0, 0, 0, 31, output.data(), output.data()).code(),
            StatusCode::kInvalid);
  run.compare_contents();
}

TEST(CallGuard, ALayerThatMustChooseWithoutAProjectionSaysSo) {
  const TestDirectory directory;
  EngineRun run(small_options(directory.path()), 7);
  run.forward(1, 30);
  const Tokens more = run.draw_tokens(1, 60);
  ASSERT_TRUE(run.give(0, more, 1).is_ok());
  const Tokens next = run.draw_tokens(1, 1);
  ASSERT_TRUE(run.give(0, next, 1).is_ok());
  std::vector<std::byte> output;
  EXPECT_TRUE(run.engine().needs_projection(0));
  const std::vector<float> query = run.draw_query(1, 1);
  EXPECT_TRUE(run.ask(0, query, 1).is_ok());
  EXPECT_EQ(run.attend(0, query, 1, output).code(), StatusCode::kInvalid);
  ASSERT_TRUE(run.set_projection(0).is_ok());
  EXPECT_TRUE(run.attend(0, query, 1, output).is_ok());
}

TEST(CallGuard, OfHeadsThatChooseApartAreCountedInSequences) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path(), 8);
  options.heads = "each";
  options.head_dim = 32;
  options.max_batch = 2;
  options.max_context = 400;
  EngineRun run(options, 7);
  run.forward(2, 100);
  EXPECT_EQ(run.engine().batch(), 2);
  const auto said = [](const Status& refused, const std::string& words) {
    EXPECT_EQ(refused.code(), StatusCode::kInvalid);
    EXPECT_NE(refused.message().find(words), std::string::npos) << refused.message();
  };
  const Tokens one = run.draw_tokens(1, 2);
  said(run.give(0, one, 1), "batch must stay 2");
  const std::vector<int64_t> beyond = {0, 2}, wide = {0, 1, 1};
  said(run.engine().select_sequences(beyond), "indices must be 0..1, got 2");
  said(run.engine().select_sequences(wide), "max_batch (2), got 3");
  const bool valid[3] = {true, true, true};
  said(run.engine().declare(3, 1, valid), "batch of 2, got 3");
  std::vector<std::byte> bytes(1 << 16);
  said(run.engine().read_back(0, 2, 0, 1, bytes.data(), bytes.data()), "of one of 2 sequences");
  run.select({1});
  run.compare_contents();
}

TEST(Options, ThatCannotWorkAreRefused) {
  const TestDirectory directory;
  const EngineOptions good = small_options(directory.path());
  std::vector<EngineOptions> wrong(11, good);
  wrong[0].groups_max = 0;
  wrong[1].pages_max = 3;
  wrong[2].group_tokens = 65;
  wrong[3].query_heads = 3;
  wrong[4].ranks = {5};
  wrong[5].ranks = {5, 10000};
  wrong[6].dtype = DType::kInt8;
  wrong[7].device_model = "floppy";
  wrong[8].head_dim = 1;  // a record of 64 bytes would be mostly padding
  wrong[9].heads = wrong[10].heads = "each";
  wrong[9].head_dim = 4;      // 128 bytes of one head
  wrong[10].ranks = {5, 40};  // wider than one head's keys
  wrong[10].group_tokens = 16;
  for (const EngineOptions& options : wrong) {
    const auto engine = Engine::create(options, nullptr);
    ASSERT_FALSE(engine.is_ok());
    EXPECT_EQ(engine.status().code(), StatusCode::kInvalid) << engine.status().message();
  }
}

TEST(Options, HeadsThatADeviceCannotAttendAreRefused) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.device = host_device({});
  options.device->head_dim_unit = 8;  // as CUDA
  options.device->head_dim_max = 256;
  for (const auto& [head_dim, is_right] : {std::pair{252, false}, {256, true}, {264, false}}) {
    options.head_dim = head_dim;
    const auto engine = Engine::create(options, nullptr);
    ASSERT_EQ(engine.is_ok(), is_right) << head_dim;
    const std::string told = is_right ? "" : engine.status().message();
    EXPECT_EQ(told.find("head_dim must be a multiple of 8 and at most 256") == std::string::npos,
              is_right);
  }
}

TEST(Options, ValuesNarrowerThanKeysAreTheHostsAlone) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.head_dim *= 2;
  options.value_dim = options.head_dim / 2;
  ASSERT_TRUE(Engine::create(options, nullptr).is_ok());
  const auto refusal = [](const EngineOptions& wrong) {
    const auto engine = Engine::create(wrong, nullptr);
    return engine.is_ok() ? "" : engine.status().message();
  };
  const auto expect_refused = [&](const EngineOptions& wrong, const char* why) {
    EXPECT_NE(refusal(wrong).find(why), std::string::npos) << refusal(wrong);
  };
  EngineOptions wrong = options;
  wrong.device = host_device({});
  expect_refused(wrong, "value_dim must be head_dim on a device");
  wrong.value_dim = wrong.head_dim;
  EXPECT_EQ(refusal(wrong), "");
  wrong = options;
  wrong.sides = 1;
  expect_refused(wrong, "value_dim must be 0 where keys are the values too");
  wrong = options;
  wrong.value_dim = options.head_dim + 1;
  expect_refused(wrong, "value_dim must be 0..");
  wrong = options;
  wrong.records = "int4";
  wrong.head_dim = 256;
  wrong.value_dim = 40;
  expect_refused(wrong, "head_dim must be a multiple of 16, and value_dim too, got 40");
}

/// A record, a page and the room to stream through are smaller by what V lacks.
TEST(Options, NarrowerValuesTakeLessOfDiskAndMemory) {
  EngineOptions options = small_options("/");
  options.kv_heads = 4;
  options.query_heads = 16;
  options.group_tokens = 8;
  options.head_dim = 192;
  options.dtype = DType::kBFloat16;
  const auto bytes = [&] { return options.payload_bytes(); };
  const auto pages = [&] {
    return memory_need(options, (bytes() + 4095) / 4096 * 4096, 1, 4096).of(Use::kPages);
  };
  const int64_t padded = bytes(), padded_pages = pages();
  options.value_dim = 128;
  EXPECT_EQ(6 * bytes(), 5 * padded);
  EXPECT_EQ(bytes(), 4 * 8 * (192 + 128) * 2);
  EXPECT_EQ(6 * pages(), 5 * padded_pages);
  options.records = "fp8";
  EXPECT_EQ(bytes(), 4 * 8 * (192 + 128));
  options.records = "int4";
  EXPECT_EQ(bytes(), 4 * (9 * (192 / 2 + 3) + 8 * (128 / 2 + 2)));
}

/// Settings and a model that the rules allow, mostly the largest and the smallest numbers.
EngineOptions drawn_options(std::mt19937_64& random) {
  EngineOptions options;
  visit_settings([&](const char*, auto member, const auto& rule) {
    using Value = std::remove_cvref_t<decltype(options.*member)>;
    using Rule = std::remove_cvref_t<decltype(rule)>;
    const Value before = options.*member;
    if constexpr (std::is_same_v<Rule, IntRange> && std::is_same_v<Value, int64_t>) {
      if (random() % 2 == 0) options.*member = random() % 2 == 0 ? rule.low : rule.high;
    } else if constexpr (std::is_same_v<Rule, OneOf> && std::is_same_v<Value, std::string>) {
      options.*member = rule.choices[random() % rule.choices.size()];
    }
    // What those before it exclude is not drawn.
    if (!check_settings(options).is_ok()) options.*member = before;
  });
  options.layers = random() % 2 == 0 ? 1 : 4096;
  options.kv_heads = random() % 2 == 0 ? 1 : 1024;
  options.query_heads = random() % 2 == 0 ? options.kv_heads : 4096;
  options.head_dim = random() % 2 == 0 ? 1 : 1024;
  if (options.rows == "low_rank") {
    const int64_t width = (options.heads == "each" ? 1 : options.kv_heads) * options.head_dim;
    options.ranks.assign(options.layers, random() % 2 == 0 ? 1 : width);
  }
  return options;
}

// Under UndefinedBehaviorSanitizer a product that overflows ends this.
TEST(Numbers, AnyThatTheRulesAllowAddUp) {
  std::mt19937_64 random(8);
  int64_t valid = 0;
  for (int64_t refresh = 0; refresh < 2000; ++refresh) {
    const EngineOptions options = drawn_options(random);
    const Status status = options.validate();
    if (!status.is_ok()) continue;
    ++valid;
    const int64_t record_bytes = (options.payload_bytes() + 4095) / 4096 * 4096;
    const int64_t least = memory_need(options, record_bytes, 1, 1).total();
    EXPECT_GT(least, 0);
    EXPECT_GE(memory_need(options, record_bytes, kBatchMax, kContextMax).total(), least);
  }
  EXPECT_GT(valid, 500);
}

TEST(Numbers, BeyondWhatCanBeAreRefusedAtTheStart) {
  const TestDirectory directory;
  for (const int64_t number : {int64_t{1} << 31, int64_t{1} << 62, int64_t{-2}}) {
    EngineOptions context = small_options(directory.path());
    EngineOptions batch = context;
    context.max_context = number;
    batch.max_batch = number;
    EXPECT_EQ(Engine::create(context, nullptr).status().code(), StatusCode::kInvalid);
    EXPECT_EQ(Engine::create(batch, nullptr).status().code(), StatusCode::kInvalid);
  }
  EngineOptions options = small_options(directory.path());
  options.max_context = kContextMax;
  options.max_batch = kBatchMax;
  options.kv_memory_bytes = int64_t{1} << 40;
  EXPECT_EQ(Engine::create(options, nullptr).status().code(), StatusCode::kBudget);
  EXPECT_TRUE(directory.is_empty());
}

}  // namespace
}  // namespace kvswap
