#include "io/secure_erase.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "io/error_text.h"
#include "io/syscalls.h"
#include "io/wait_policy.h"

namespace kvswap {
namespace {

constexpr int64_t kCallBytes = 1 << 20;  // and its alignment, which suits every disk
constexpr int kAttemptsMax = 300;        // in a row, a millisecond apart
constexpr int kPauseMicroseconds = 1000;

}  // namespace

int write_zeros(int fd, int64_t offset_bytes, int64_t length_bytes) {
  struct Free {
    void operator()(void* block) const { std::free(block); }
  };
  const std::unique_ptr<void, Free> zeros(std::aligned_alloc(kCallBytes, kCallBytes));
  if (!zeros) return ENOMEM;
  std::memset(zeros.get(), 0, kCallBytes);
  int attempts = 0;
  const int64_t end = offset_bytes + length_bytes;
  for (int64_t at = offset_bytes; at < end;) {
    const auto length = static_cast<size_t>(std::min(kCallBytes, end - at));
    const int64_t count = syscalls().pwrite(fd, zeros.get(), length, at);
    if (count > 0) {
      at += count;
      attempts = 0;
      continue;
    }
    const int error = count == 0 ? EIO : static_cast<int>(-count);
    if ((error != EINTR && error != EAGAIN) || ++attempts == kAttemptsMax) return error;
    ::usleep(kPauseMicroseconds);
  }
  return 0;
}

int overwrite_with_zeros(int fd, int64_t offset_bytes, int64_t length_bytes) {
  const int error = write_zeros(fd, offset_bytes, length_bytes);
  if (error != 0) return error;
  return ::fdatasync(fd) == 0 ? 0 : errno;
}

void wipe_at_end(int fd, int64_t bytes, const std::string& file) {
  const int error = overwrite_with_zeros(fd, 0, bytes);
  if (error == 0) return;
  log_line("kvswap: " + file + " could not be wiped (" + errno_text(error) +
           "): its bytes stay on the disk until they are overwritten.");
}

}  // namespace kvswap
