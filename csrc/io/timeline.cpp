#include "io/timeline.h"

#include <algorithm>
#include <chrono>

namespace kvswap {
namespace {

constexpr int kKindShift = 56;
constexpr int kLayerShift = 32;
constexpr uint64_t kLayerMask = (1 << 24) - 1;  // of layer + 1
constexpr uint64_t kTicketMask = (uint64_t{1} << 32) - 1;

uint64_t pack(const Span& span) {
  return static_cast<uint64_t>(span.kind) << kKindShift |
         (static_cast<uint64_t>(span.layer + 1) & kLayerMask) << kLayerShift |
         (span.ticket & kTicketMask);
}

void unpack(uint64_t what, Span& span) {
  span.kind = static_cast<SpanKind>(what >> kKindShift);
  span.layer = static_cast<int64_t>(what >> kLayerShift & kLayerMask) - 1;
  span.ticket = what & kTicketMask;
}

}  // namespace

const char* span_name(SpanKind kind) {
  static constexpr const char* kNames[kSpanKinds] = {
      "predict", "select",         "plan",   "submit", "wait", "land",
      "attend",  "attend exactly", "append", "seal",   "read", "write"};
  return kNames[static_cast<int>(kind)];
}

int64_t Timeline::now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Timeline::record(const Span& span) {
  const uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
  Slot& slot = slots_[number % slots_.size()];
  const uint64_t whole = 2 * (number + 1);
  uint64_t seen = slot.version.load(std::memory_order_relaxed);
  // Held up by another writer that came around the ring, or behind it: this span is the lost one.
  if (seen % 2 != 0 || seen > whole) return;
  if (!slot.version.compare_exchange_strong(seen, whole - 1, std::memory_order_relaxed)) return;
  // Released each, so that none is seen before the odd version.
  slot.what.store(pack(span), std::memory_order_release);
  slot.begin_ns.store(span.begin_ns, std::memory_order_release);
  slot.end_ns.store(span.end_ns, std::memory_order_release);
  slot.bytes.store(span.bytes, std::memory_order_release);
  slot.version.store(whole, std::memory_order_release);
}

std::vector<Span> Timeline::spans() const {
  std::vector<Span> spans;
  spans.reserve(slots_.size());
  for (const Slot& slot : slots_) {
    const uint64_t version = slot.version.load(std::memory_order_acquire);
    if (version == 0 || version % 2 != 0) continue;
    Span span;
    // Acquired each, so that the version is looked at again after them.
    unpack(slot.what.load(std::memory_order_acquire), span);
    span.begin_ns = slot.begin_ns.load(std::memory_order_acquire);
    span.end_ns = slot.end_ns.load(std::memory_order_acquire);
    span.bytes = slot.bytes.load(std::memory_order_acquire);
    if (slot.version.load(std::memory_order_relaxed) == version) spans.push_back(span);
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return a.begin_ns != b.begin_ns ? a.begin_ns < b.begin_ns : a.end_ns > b.end_ns;
  });
  return spans;
}

}  // namespace kvswap
