#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <span>
#include <string>

#include "io/status.h"

namespace kvswap {

/// One read on its way to its targets: what is still missing, and what the result of a system call
/// means for it. It makes no call itself, so every reader obeys the same rules.
///
/// The targets are the reader's own copy: they shrink as bytes arrive.
class ReadProgress {
 public:
  enum class Next { kDone, kCallAgain, kFailed };

  /// One preadv: `targets` stays valid until the next call of next_call() or apply().
  struct Call {
    int64_t offset_bytes = 0;
    const iovec* targets = nullptr;
    int targets_count = 0;
  };

  ReadProgress(int64_t offset_bytes, std::span<iovec> targets);

  /// What to ask the kernel for next; at most `call_bytes_max` unless one target alone is longer,
  /// which is then asked for in part.
  Call next_call(int64_t call_bytes_max);

  /// Takes in what the call returned: bytes, or minus errno. A count that is no multiple of
  /// `alignment_bytes` can only be the end of the file.
  Next apply(int64_t result, int64_t alignment_bytes);

  int64_t missing_bytes() const { return missing_bytes_; }
  /// Of the first byte that is missing.
  int64_t offset_bytes() const { return offset_bytes_; }

  /// After kCallAgain: errors come in a row, and some time should pass before the next call.
  bool needs_pause() const;
  static void pause();

  /// Why it failed, for a person; only after kFailed.
  Status failure(const std::string& directory) const;
  /// Only after kFailed; 0: the file ended before all of it.
  int error_number() const { return error_number_; }

 private:
  void advance(int64_t bytes);

  int64_t offset_bytes_;
  int64_t missing_bytes_ = 0;
  std::span<iovec> targets_;
  iovec partial_{};
  int transient_errors_ = 0;
  int io_errors_ = 0;
  int error_number_ = 0;  // 0 with kFailed: the file ended
};

}  // namespace kvswap
