#include "io/syscalls.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>

#if KVSWAP_HAS_URING
#include <liburing.h>
#endif

#if defined(__has_feature)
#define KVSWAP_CLANG_TSAN __has_feature(thread_sanitizer)
#else
#define KVSWAP_CLANG_TSAN 0
#endif

namespace kvswap {
namespace {

/// A file that outgrows the limit of `ulimit -f` sends SIGXFSZ, which ends a program that does not
/// expect it; with the signal blocked the call returns EFBIG alone.
class BlockedFileSizeSignal {
 public:
  BlockedFileSizeSignal() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~BlockedFileSizeSignal() {
    if (sigismember(&before_, SIGXFSZ) == 1) return;
    const timespec at_once{};
    while (sigtimedwait(&signal_, nullptr, &at_once) < 0 && errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  BlockedFileSizeSignal(const BlockedFileSizeSignal&) = delete;
  BlockedFileSizeSignal& operator=(const BlockedFileSizeSignal&) = delete;

 private:
  sigset_t signal_;
  sigset_t before_;
};

template <typename T>
T or_errno(T result) {
  return result < 0 ? -errno : result;
}

Syscalls linux_itself;
std::atomic<Syscalls*> in_use = &linux_itself;

}  // namespace

int Syscalls::open(const char* path, int flags, mode_t mode) {
  return or_errno(::open(path, flags, mode));
}

int Syscalls::fallocate(int fd, int mode, int64_t offset_bytes, int64_t length_bytes) {
  const BlockedFileSizeSignal blocked;
  return or_errno(::fallocate(fd, mode, offset_bytes, length_bytes));
}

int Syscalls::ftruncate(int fd, int64_t size_bytes) {
  const BlockedFileSizeSignal blocked;
  return or_errno(::ftruncate(fd, size_bytes));
}

int Syscalls::write_back(int fd, int64_t offset_bytes, int64_t length_bytes) {
  return or_errno(::sync_file_range(
      fd, offset_bytes, length_bytes,
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER));
}

int Syscalls::fsync(int fd) { return or_errno(::fsync(fd)); }

int Syscalls::name_file(int fd, int folder, const char* name) {
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  return or_errno(::linkat(AT_FDCWD, link.c_str(), folder, name, AT_SYMLINK_FOLLOW));
}

int Syscalls::rename(int folder, const char* from, const char* to, unsigned flags) {
  return or_errno(static_cast<int>(::syscall(SYS_renameat2, folder, from, folder, to, flags)));
}

int Syscalls::make_folder(int parent, const char* name, mode_t mode) {
  return or_errno(::mkdirat(parent, name, mode));
}

int Syscalls::open_at(int folder, const char* name, int flags, mode_t mode) {
  return or_errno(::openat(folder, name, flags, mode));
}

int Syscalls::facts(int fd, struct stat* facts) { return or_errno(::fstat(fd, facts)); }

int Syscalls::facts_at(int folder, const char* name, struct stat* facts, int flags) {
  return or_errno(::fstatat(folder, name, facts, flags));
}

int64_t Syscalls::pwrite(int fd, const void* data, size_t bytes, int64_t offset_bytes) {
  const BlockedFileSizeSignal blocked;
  return or_errno<int64_t>(::pwrite(fd, data, bytes, offset_bytes));
}

int64_t Syscalls::preadv(int fd, const iovec* targets, int count, int64_t offset_bytes) {
#if defined(__SANITIZE_THREAD__) || KVSWAP_CLANG_TSAN
  // Gaps of merged reads land in one scrap area from several threads at once, and nobody reads it.
  // The interceptor of preadv() would call that a race.
  return or_errno<int64_t>(::syscall(SYS_preadv, fd, targets, count, offset_bytes, 0));
#else
  return or_errno<int64_t>(::preadv(fd, targets, count, offset_bytes));
#endif
}

#if KVSWAP_HAS_URING

int Syscalls::ring_setup(unsigned entries, io_uring* ring, unsigned flags) {
  return io_uring_queue_init(entries, ring, flags);
}

int Syscalls::ring_submit(io_uring* ring, unsigned completions) {
  return completions == 0 ? io_uring_submit(ring) : io_uring_submit_and_wait(ring, completions);
}

int Syscalls::ring_reap(io_uring* ring, std::span<RingCompletion> completions) {
  io_uring_cqe* entry = nullptr;
  unsigned head = 0;
  unsigned count = 0;
  io_uring_for_each_cqe(ring, head, entry) {
    if (count == completions.size()) break;
    completions[count++] = {entry->user_data, entry->res};
  }
  io_uring_cq_advance(ring, count);
  return static_cast<int>(count);
}

#else

int Syscalls::ring_setup(unsigned, io_uring*, unsigned) { return -ENOSYS; }
int Syscalls::ring_submit(io_uring*, unsigned) { return -ENOSYS; }
int Syscalls::ring_reap(io_uring*, std::span<RingCompletion>) { return 0; }

#endif

Syscalls& syscalls() { return *in_use.load(std::memory_order_acquire); }

void use_syscalls(Syscalls* replacing) {
  in_use.store(replacing == nullptr ? &linux_itself : replacing, std::memory_order_release);
}

}  // namespace kvswap
