#pragma once

#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

#include "io/read_progress.h"

#if defined(__has_feature)
#define KVSWAP_CLANG_TSAN __has_feature(thread_sanitizer)
#else
#define KVSWAP_CLANG_TSAN 0
#endif

namespace kvswap {

/// preadv: bytes, or minus errno.
inline int64_t call_preadv(int fd, const ReadProgress::Call& call) {
#if defined(__SANITIZE_THREAD__) || KVSWAP_CLANG_TSAN
  // Gaps of merged reads land in one scrap area from several threads at once, and nobody reads it.
  // The interceptor of preadv() would call that a race.
  const int64_t result =
      ::syscall(SYS_preadv, fd, call.targets, call.targets_count, call.offset_bytes, 0);
#else
  const int64_t result = ::preadv(fd, call.targets, call.targets_count, call.offset_bytes);
#endif
  return result < 0 ? -errno : result;
}

}  // namespace kvswap
