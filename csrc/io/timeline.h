#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace kvswap {

/// What a stretch of time was spent on.
enum class SpanKind : uint8_t {
  // Of the calling thread.
  kPredict,        // the next layer's query
  kSelect,         // project, score, choose
  kPlan,           // page maps; submit is a part of it
  kSubmit,         // merging, handing reads to the reader
  kWait,           // the caller stands still until its reads are through
  kLand,           // checksums, shared records, pages of a device
  kAttend,         // the attention kernel
  kAttendExactly,  // of a long chunk over everything before it
  kAppend,         // packing and summarising new tokens
  kSeal,           // groups leave for the writer
  // Of the disk.
  kRead,   // one merged read, from its start to its last byte
  kWrite,  // one write behind
};
inline constexpr int kSpanKinds = 12;
const char* span_name(SpanKind kind);

/// One stretch. Times are nanoseconds of the steady clock.
struct Span {
  SpanKind kind = SpanKind::kPredict;
  int64_t layer = -1;   // -1: not known
  uint64_t ticket = 0;  // of the batch of reads it belongs to, its low 32 bits are kept; 0: none
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t bytes = 0;  // moved in it; 0 where nothing is counted
};

/// The newest spans of a session: a ring whose memory is taken once.
///
/// Recording takes some tens of nanoseconds, no lock and no memory. A span is lost only when a
/// thread is held up in the middle of recording while the others go once around the ring.
///
/// Thread rules: record() and spans() from any thread.
class Timeline {
 public:
  /// spans: how many are kept, 1 at least.
  explicit Timeline(int64_t spans) : slots_(static_cast<size_t>(spans)) {}

  void record(const Span& span);

  /// What is kept, by beginning; of those that begin together the longest first.
  std::vector<Span> spans() const;
  /// All that were recorded, those no longer kept included.
  uint64_t recorded() const { return next_.load(std::memory_order_relaxed); }

  static int64_t bytes(int64_t spans) { return spans * int64_t{sizeof(Slot)}; }
  static int64_t now_ns();

 private:
  /// `version` is 0 while empty, odd while being written, 2 * (number + 1) when span `number` is
  /// whole. A reader that sees the same even version before and after has read one span.
  struct Slot {
    std::atomic<uint64_t> version = 0;
    std::atomic<uint64_t> what = 0;  // kind, layer, ticket
    std::atomic<int64_t> begin_ns = 0;
    std::atomic<int64_t> end_ns = 0;
    std::atomic<int64_t> bytes = 0;
  };

  std::vector<Slot> slots_;
  std::atomic<uint64_t> next_ = 0;
};

}  // namespace kvswap
