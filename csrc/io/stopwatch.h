#pragma once

#include <cstdint>

#include "io/timeline.h"

namespace kvswap {

/// Adds the seconds of its life to a total and records them in a timeline: the same two readings of
/// the clock serve both. Without either it reads none.
class Stopwatch {
 public:
  /// timeline, total: may be null. `what` is recorded; its times are set here.
  Stopwatch(Timeline* timeline, const Span& what, double* total = nullptr)
      : timeline_(timeline), total_(total), span_(what) {
    if (is_running()) span_.begin_ns = Timeline::now_ns();
  }
  ~Stopwatch() {
    if (!is_running()) return;
    span_.end_ns = Timeline::now_ns();
    if (total_ != nullptr) *total_ += 1e-9 * static_cast<double>(span_.end_ns - span_.begin_ns);
    if (timeline_ != nullptr) timeline_->record(span_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  bool is_running() const { return timeline_ != nullptr || total_ != nullptr; }

  Timeline* timeline_;
  double* total_;
  Span span_;
};

}  // namespace kvswap
