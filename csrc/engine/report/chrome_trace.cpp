#include "engine/report/chrome_trace.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <vector>

namespace kvswap {
namespace {

enum class Track { kCaller = 1, kReads = 2, kWrites = 3 };

/// The reads of one submission.
struct FetchSpan {
  int64_t layer = -1;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t bytes = 0;
  bool has_reads = false;
};

/// Text of one trace; events are appended as they come.
class Trace {
 public:
  explicit Trace(int64_t zero_ns) : zero_ns_(zero_ns) {
    name("process_name", Track::kCaller, "kvswap");
    name("thread_name", Track::kCaller, "model and engine");
    name("thread_name", Track::kReads, "reads");
    name("thread_name", Track::kWrites, "writes");
  }

  void complete(const std::string& category, const std::string& event, Track track,
                const Span& span) {
    begin_event("X", category, event, track, span.begin_ns);
    text_ += ",\"dur\":" + microseconds(span.end_ns - span.begin_ns);
    arguments(span.layer, span.bytes, span.ticket);
  }

  /// A begin and an end that share an id, for what overlaps its neighbours.
  void overlapping(const std::string& category, const std::string& event, Track track,
                   const Span& span) {
    const std::string id = ",\"id\":" + std::to_string(++last_id_);
    begin_event("b", category, event, track, span.begin_ns);
    text_ += id;
    arguments(span.layer, span.bytes, span.ticket);
    begin_event("e", category, event, track, span.end_ns);
    text_ += id + "}";
  }

  std::string finish(uint64_t recorded, size_t retained) {
    return "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"spans_recorded\":" +
           std::to_string(recorded) + ",\"spans_kept\":" + std::to_string(retained) +
           "},\"traceEvents\":[\n" + text_ + "\n]}\n";
  }

 private:
  static std::string microseconds(int64_t nanoseconds) {
    char text[40];
    std::snprintf(text, sizeof(text), "%lld.%03lld", static_cast<long long>(nanoseconds / 1000),
                  static_cast<long long>(nanoseconds % 1000));
    return text;
  }

  static std::string place(Track track) {
    return ",\"pid\":1,\"tid\":" + std::to_string(static_cast<int>(track));
  }

  void name(const char* what, Track track, const std::string& value) {
    if (!text_.empty()) text_ += ",\n";
    text_ += "{\"ph\":\"M\",\"name\":\"" + std::string(what) + "\"" + place(track) +
             ",\"args\":{\"name\":\"" + value + "\"}}";
  }

  void begin_event(const char* phase, const std::string& category, const std::string& event,
                   Track track, int64_t at_ns) {
    text_ += ",\n{\"ph\":\"" + std::string(phase) + "\",\"cat\":\"" + category + "\",\"name\":\"" +
             event + "\"" + place(track) + ",\"ts\":" + microseconds(at_ns - zero_ns_);
  }

  void arguments(int64_t layer, int64_t bytes, uint64_t ticket) {
    text_ += ",\"args\":{\"layer\":" + std::to_string(layer);
    if (bytes > 0) text_ += ",\"bytes\":" + std::to_string(bytes);
    if (ticket > 0) text_ += ",\"batch\":" + std::to_string(ticket);
    text_ += "}}";
  }

  int64_t zero_ns_;
  uint64_t last_id_ = 0;
  std::string text_;
};

/// What was submitted and read, by ticket. Reads whose submission is no longer kept have no layer.
std::map<uint64_t, FetchSpan> fetches(const std::vector<Span>& spans) {
  std::map<uint64_t, FetchSpan> fetches;
  for (const Span& span : spans) {
    if (span.kind == SpanKind::kSubmit && span.ticket != 0) {
      FetchSpan& fetch = fetches[span.ticket];
      fetch.layer = span.layer;
      fetch.begin_ns = span.end_ns;
    }
  }
  for (const Span& span : spans) {
    if (span.kind != SpanKind::kRead) continue;
    FetchSpan& fetch = fetches[span.ticket];
    const bool is_first = !fetch.has_reads && fetch.layer < 0;
    fetch.begin_ns = is_first ? span.begin_ns : std::min(fetch.begin_ns, span.begin_ns);
    fetch.end_ns = std::max(fetch.end_ns, span.end_ns);
    fetch.bytes += span.bytes;
    fetch.has_reads = true;
  }
  return fetches;
}

}  // namespace

std::string chrome_trace(const Timeline& timeline) {
  const std::vector<Span> spans = timeline.spans();
  const auto by_ticket = fetches(spans);
  Trace trace(spans.empty() ? 0 : spans.front().begin_ns);
  int64_t covered_ns = 0;  // the calling thread's spans reach to here; 0: none was seen
  for (Span span : spans) {
    if (span.kind == SpanKind::kRead) {
      span.layer = by_ticket.at(span.ticket).layer;
      trace.overlapping("read", span_name(span.kind), Track::kReads, span);
    } else if (span.kind == SpanKind::kWrite) {
      trace.complete("write", span_name(span.kind), Track::kWrites, span);
    } else {
      if (covered_ns != 0 && span.begin_ns > covered_ns) {
        const Span model = {.begin_ns = covered_ns, .end_ns = span.begin_ns};
        trace.complete("model", "model", Track::kCaller, model);
      }
      covered_ns = std::max(covered_ns, span.end_ns);
      trace.complete("engine", span_name(span.kind), Track::kCaller, span);
    }
  }
  for (const auto& [ticket, fetch] : by_ticket) {
    if (!fetch.has_reads) continue;
    const Span span = {.layer = fetch.layer,
                       .ticket = ticket,
                       .begin_ns = fetch.begin_ns,
                       .end_ns = fetch.end_ns,
                       .bytes = fetch.bytes};
    trace.overlapping("fetch", "fetch", Track::kReads, span);
  }
  return trace.finish(timeline.recorded(), spans.size());
}

}  // namespace kvswap
