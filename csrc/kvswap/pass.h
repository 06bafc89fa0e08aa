#pragma once

namespace kvswap {

/// What a forward pass is. The program says so; it is never guessed from a length.
enum class Pass {
  /// Text that is read: attends exactly over everything before it, which streams from disk. Of any
  /// length, one token too.
  kPrefill,
  /// A step of an answer: attends over sinks, selected groups and tail. Of at most
  /// select_queries_max tokens; several are a draft that is checked.
  kDecode,
};

}  // namespace kvswap
