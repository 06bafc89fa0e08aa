// The ring of spans: what it keeps, in which order, and from several threads at once.

#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "io/stopwatch.h"
#include "io/timeline.h"

namespace kvswap {
namespace {

Span numbered(int64_t number) {
  return {.kind = SpanKind::kRead,
          .layer = number % 1000,
          .ticket = static_cast<uint64_t>(number),
          .begin_ns = number,
          .end_ns = 2 * number,
          .bytes = 3 * number};
}

void expect_whole(const Span& span) {
  const Span expected = numbered(span.begin_ns);
  EXPECT_EQ(span.kind, expected.kind);
  EXPECT_EQ(span.layer, expected.layer);
  EXPECT_EQ(span.ticket, expected.ticket);
  EXPECT_EQ(span.end_ns, expected.end_ns);
  EXPECT_EQ(span.bytes, expected.bytes);
}

TEST(Timeline, KeepsEveryFieldOfASpan) {
  Timeline timeline(4);
  const Span unknown = {.kind = SpanKind::kWrite, .begin_ns = 1, .end_ns = 2};
  timeline.record(unknown);
  timeline.record(numbered(7));
  const std::vector<Span> spans = timeline.spans();
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0].kind, SpanKind::kWrite);
  EXPECT_EQ(spans[0].layer, -1);
  EXPECT_EQ(spans[0].ticket, 0u);
  expect_whole(spans[1]);
}

TEST(Timeline, KeepsTheNewestAndCountsAll) {
  Timeline timeline(5);
  EXPECT_TRUE(timeline.spans().empty());
  for (int64_t number = 1; number <= 12; ++number) timeline.record(numbered(number));
  const std::vector<Span> spans = timeline.spans();
  ASSERT_EQ(spans.size(), 5u);
  for (size_t i = 0; i < spans.size(); ++i) {
    EXPECT_EQ(spans[i].begin_ns, static_cast<int64_t>(8 + i));
    expect_whole(spans[i]);
  }
  EXPECT_EQ(timeline.recorded(), 12u);
}

TEST(Timeline, PutsTheOuterOfTwoThatBeginTogetherFirst) {
  Timeline timeline(2);
  timeline.record({.kind = SpanKind::kSubmit, .begin_ns = 10, .end_ns = 20});
  timeline.record({.kind = SpanKind::kPlan, .begin_ns = 10, .end_ns = 30});
  EXPECT_EQ(timeline.spans()[0].kind, SpanKind::kPlan);
}

TEST(Timeline, ThreadsNeverMixTheirSpans) {
  constexpr int64_t kThreads = 4;
  constexpr int64_t kEach = 5000;
  Timeline timeline(64);
  std::vector<std::thread> threads;
  for (int64_t index = 0; index < kThreads; ++index) {
    threads.emplace_back([&timeline, index] {
      for (int64_t i = 0; i < kEach; ++i) timeline.record(numbered(index * kEach + i + 1));
    });
  }
  for (int look = 0; look < 50; ++look) {
    for (const Span& span : timeline.spans()) expect_whole(span);
  }
  for (std::thread& thread : threads) thread.join();
  std::set<int64_t> seen;
  for (const Span& span : timeline.spans()) {
    expect_whole(span);
    seen.insert(span.begin_ns);
  }
  EXPECT_EQ(seen.size(), timeline.spans().size());
  EXPECT_GT(seen.size(), 0u);
  EXPECT_EQ(timeline.recorded(), static_cast<uint64_t>(kThreads * kEach));
}

TEST(Stopwatch, CountsAndRecordsTheSameTime) {
  Timeline timeline(4);
  double total = 0;
  {
    const Stopwatch watch(&timeline, {.kind = SpanKind::kPlan, .layer = 3}, &total);
  }
  {
    const Stopwatch watch(nullptr, {.kind = SpanKind::kPlan});
  }
  const std::vector<Span> spans = timeline.spans();
  ASSERT_EQ(spans.size(), 1u);
  EXPECT_EQ(spans[0].layer, 3);
  EXPECT_DOUBLE_EQ(total, 1e-9 * static_cast<double>(spans[0].end_ns - spans[0].begin_ns));
}

}  // namespace
}  // namespace kvswap
