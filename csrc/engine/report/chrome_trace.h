#pragma once

#include <string>

#include "io/timeline.h"

namespace kvswap {

/// The timeline as trace events in JSON, which Perfetto and chrome://tracing open.
///
/// Tracks: "model and engine", the calling thread, whose spans nest; what lies between them is the
/// program's own and named "model". "reads": each merged read, and around those of one layer a
/// fetch, from its submission to its last byte; they overlap, so they are asynchronous events.
/// "writes". Times are microseconds since the oldest span.
std::string chrome_trace(const Timeline& timeline);

}  // namespace kvswap
