// What an engine records of itself, over every way of reading.

#include <map>

#include "device/host_device.h"
#include "engine/report/chrome_trace.h"
#include "engine/report/engine_report.h"
#include "engine_run.h"

namespace kvswap {
namespace {

constexpr int64_t kSpans = 1 << 16;

struct BackEnd {
  const char* reader;
  const char* model;  // of a device; empty: the disk as it is
  bool on_device;
};

EngineOptions recording(const std::string& directory, const BackEnd& back_end) {
  EngineOptions options = small_options(directory);
  options.reader = back_end.reader;
  if (*back_end.model != 0) options.device_model = back_end.model;
  if (back_end.on_device) options.device = host_device({});
  options.timeline_spans = kSpans;
  options.look_ahead = "trust";
  return options;
}

/// A prefill and some steps, each of which reads.
void decode(EngineRun& run) {
  run.forward(2, 60);
  for (int step = 0; step < 12; ++step) run.forward(2, 1 + step % 4);
}

double seconds_of(const std::vector<Span>& spans, SpanKind kind) {
  double seconds = 0;
  for (const Span& span : spans) {
    if (span.kind == kind) seconds += 1e-9 * static_cast<double>(span.end_ns - span.begin_ns);
  }
  return seconds;
}

int64_t bytes_of(const std::vector<Span>& spans, SpanKind kind) {
  int64_t bytes = 0;
  for (const Span& span : spans) bytes += span.kind == kind ? span.bytes : 0;
  return bytes;
}

class Recorded : public testing::TestWithParam<BackEnd> {};

TEST_P(Recorded, SpansOfTheCallerNest) {
  const TestDirectory directory;
  EngineRun run(recording(directory.path(), GetParam()), 11);
  decode(run);
  std::vector<int64_t> ends;  // of the spans that are open
  for (const Span& span : run.engine().context().timeline->spans()) {
    ASSERT_LE(span.begin_ns, span.end_ns) << span_name(span.kind);
    if (span.kind >= SpanKind::kRead) continue;  // the disk's
    while (!ends.empty() && ends.back() <= span.begin_ns) ends.pop_back();
    if (!ends.empty()) {
      ASSERT_LE(span.end_ns, ends.back()) << span_name(span.kind);
    }
    ends.push_back(span.end_ns);
  }
}

TEST_P(Recorded, TotalsAreTheCounters) {
  const TestDirectory directory;
  EngineRun run(recording(directory.path(), GetParam()), 12);
  decode(run);
  Engine& engine = run.engine();
  run.select({0, 1});  // waits for what is under way
  ASSERT_TRUE(engine.context().store->writes().flush().is_ok());
  const uint64_t written = engine.context().store->writes().queue().bytes_written();
  const std::vector<Span> spans = engine.context().timeline->spans();
  ASSERT_LT(engine.context().timeline->recorded(),
            static_cast<uint64_t>(kSpans));  // none was overwritten
  const EngineCounters& counters = engine.context().counters;
  const FetchCounters& fetches = engine.context().fetcher->counters();
  EXPECT_NEAR(seconds_of(spans, SpanKind::kSelect), counters.select_seconds, 1e-9);
  EXPECT_NEAR(seconds_of(spans, SpanKind::kPlan), counters.plan_seconds, 1e-9);
  EXPECT_NEAR(seconds_of(spans, SpanKind::kAttend), counters.attend_seconds, 1e-9);
  EXPECT_NEAR(seconds_of(spans, SpanKind::kAppend), counters.append_seconds, 1e-9);
  EXPECT_NEAR(seconds_of(spans, SpanKind::kWait), fetches.wait_seconds, 1e-9);
  EXPECT_EQ(bytes_of(spans, SpanKind::kRead),
            static_cast<int64_t>(engine.context().fetcher->reader().counters().bytes));
  EXPECT_GE(bytes_of(spans, SpanKind::kWrite), static_cast<int64_t>(written));
  EXPECT_GT(written, 0u);
}

TEST_P(Recorded, ReadsEndBeforeTheWaitOfTheirLayerEnds) {
  const TestDirectory directory;
  EngineRun run(recording(directory.path(), GetParam()), 13);
  decode(run);
  const std::vector<Span> spans = run.engine().context().timeline->spans();
  std::map<uint64_t, Span> waits;
  for (const Span& span : spans) {
    if (span.kind == SpanKind::kWait) waits[span.ticket] = span;
  }
  int64_t compared = 0;
  for (const Span& span : spans) {
    if (span.kind != SpanKind::kRead && span.kind != SpanKind::kSubmit) continue;
    const auto wait = waits.find(span.ticket);
    if (wait == waits.end()) continue;  // still in flight
    EXPECT_LE(span.end_ns, wait->second.end_ns);
    if (span.kind == SpanKind::kSubmit) {
      EXPECT_EQ(span.layer, wait->second.layer);
    }
    ++compared;
  }
  EXPECT_GT(compared, 10);
}

/// The layers whose reads were submitted since there were `begin` spans, in order.
std::vector<int64_t> submitted_since(Engine& engine, size_t begin) {
  std::vector<int64_t> layers;
  const std::vector<Span> spans = engine.context().timeline->spans();
  for (size_t i = begin; i < spans.size(); ++i) {
    if (spans[i].kind == SpanKind::kSubmit) layers.push_back(spans[i].layer);
  }
  return layers;
}

/// A layer that chooses with its own query waits for the disk at once: what was predicted for the
/// next one is read behind it, but where a device is still choosing that. A layer that has looked
/// ahead itself leaves the disk free.
TEST_P(Recorded, ALayersOwnReadsAreSubmittedBeforeTheNextOnes) {
  const TestDirectory directory;
  EngineOptions options = recording(directory.path(), GetParam());
  options.replacement = "none";  // so that every step reads
  EngineRun run(options, 15);
  decode(run);
  Engine& engine = run.engine();
  for (const bool looks_ahead : {false, true}) {
    const size_t begin = engine.context().timeline->spans().size();
    if (looks_ahead) run.look_ahead(0, 1);
    run.look_ahead(1, 1);
    for (int64_t layer = 0; layer < 2; ++layer) {
      run.append(layer, 2, 1);
      run.attend_and_compare(layer, 1);
    }
    if (GetParam().on_device && !looks_ahead) continue;
    EXPECT_EQ(submitted_since(engine, begin), (std::vector<int64_t>{0, 1}));
  }
}

/// Nothing is lost where the layer before never attends, or all is given up.
TEST_P(Recorded, ReadsThatWaitBehindALayerAreSubmittedWithoutIt) {
  const TestDirectory directory;
  EngineOptions options = recording(directory.path(), GetParam());
  options.replacement = "none";
  EngineRun run(options, 16);
  decode(run);
  run.look_ahead(1, 1);
  run.append(1, 2, 1);
  run.attend_and_compare(1, 1);
  run.append(0, 2, 1);
  run.attend_and_compare(0, 1);
  run.look_ahead(1, 1);
  run.select({1, 0});
  run.look_ahead(1, 1);
  run.crop(40);
  run.forward(2, 1);
  run.compare_contents();
  run.look_ahead(1, 1);  // the destructor waits
}

TEST_P(Recorded, TracePairsItsBeginsAndEnds) {
  const TestDirectory directory;
  EngineRun run(recording(directory.path(), GetParam()), 14);
  decode(run);
  std::string trace;
  ASSERT_TRUE(engine_timeline(run.engine(), trace).is_ok());
  const auto count = [&](const std::string& words) {
    int64_t found = 0;
    for (size_t at = trace.find(words); at != std::string::npos; at = trace.find(words, at + 1)) {
      ++found;
    }
    return found;
  };
  EXPECT_GT(count("\"ph\":\"b\""), 10);
  EXPECT_EQ(count("\"ph\":\"b\""), count("\"ph\":\"e\""));
  for (const char* kind : {"select", "plan", "submit", "wait", "land", "attend", "append", "seal",
                           "model", "read", "write", "fetch"}) {
    EXPECT_GT(count("\"name\":\"" + std::string(kind) + "\""), 0) << kind;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Recorded,
                         testing::Values(BackEnd{"sync", "", false}, BackEnd{"threads", "", false},
                                         BackEnd{"auto", "", false}, BackEnd{"auto", "nvme", false},
                                         BackEnd{"threads", "", true}));

TEST(EngineTimeline, IsNotThereUnlessAskedFor) {
  const TestDirectory directory;
  EngineRun run(small_options(directory.path()), 15);
  decode(run);
  EXPECT_EQ(run.engine().context().timeline, nullptr);
  EXPECT_EQ(run.engine().context().ledger.used(Use::kTimeline), 0);
  std::string trace;
  const Status refused = engine_timeline(run.engine(), trace);
  EXPECT_EQ(refused.code(), StatusCode::kInvalid);
  EXPECT_NE(refused.message().find("timeline_spans"), std::string::npos);
}

TEST(EngineTimeline, KeepsTheNewestSteps) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.timeline_spans = 40;
  EngineRun run(options, 16);
  decode(run);
  const int64_t before_ns = Timeline::now_ns();
  for (int step = 0; step < 12; ++step) run.forward(2, 1);
  const std::vector<Span> spans = run.engine().context().timeline->spans();
  EXPECT_EQ(spans.size(), 40u);
  EXPECT_GT(spans.front().begin_ns, before_ns);
}

TEST(EngineTimeline, IsPartOfTheBudget) {
  const TestDirectory directory;
  EngineOptions options = small_options(directory.path());
  options.max_context = 200;
  options.max_batch = 1;
  auto plain = Engine::create(options, nullptr);
  ASSERT_TRUE(plain.is_ok());
  const int64_t record_bytes = plain.value()->context().record_bytes();
  // A smaller budget has smaller write buffers: until it is just met.
  for (int i = 0; i < 5; ++i) {
    options.kv_memory_bytes = memory_need(options, record_bytes, 1, 200).total();
  }
  ASSERT_TRUE(Engine::create(options, nullptr).is_ok());
  options.timeline_spans = 1000;
  auto refused = Engine::create(options, nullptr);
  ASSERT_FALSE(refused.is_ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kBudget);
  EXPECT_NE(refused.status().message().find("timeline"), std::string::npos);
  options.kv_memory_bytes += Timeline::bytes(1000);
  auto granted = Engine::create(options, nullptr);
  ASSERT_TRUE(granted.is_ok()) << granted.status().message();
  EXPECT_EQ(granted.value()->context().ledger.used(Use::kTimeline), Timeline::bytes(1000));
}

}  // namespace
}  // namespace kvswap
