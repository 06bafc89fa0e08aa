// What glibc has had since 2.28 and our libraries use, in terms of what it had then. Linked into
// them, hidden.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <time.h>

// 2.32: whether libstdc++ may count without atomic instructions. It may not.
char __libc_single_threaded = 0;

// 2.33; before, these were calls with a number of the structure.
#if defined(__x86_64__)
enum { kStat = 1 };
#else
enum { kStat = 0 };
#endif
int __xstat(int version, const char* path, struct stat* told);
int __lxstat(int version, const char* path, struct stat* told);
int __fxstat(int version, int fd, struct stat* told);
int __fxstatat(int version, int folder, const char* path, struct stat* told, int flags);

int stat(const char* path, struct stat* told) { return __xstat(kStat, path, told); }
int lstat(const char* path, struct stat* told) { return __lxstat(kStat, path, told); }
int fstat(int fd, struct stat* told) { return __fxstat(kStat, fd, told); }
int fstatat(int folder, const char* path, struct stat* told, int flags) {
  return __fxstatat(kStat, folder, path, told, flags);
}

// 2.30: a wait until a time of the steady clock. Where the machine's own is there it is taken;
// else the time is told by the other clock, and a wait that ends early is asked again by its caller.
typedef int Wait(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);

static Wait* own_wait(void) {
  static _Atomic(Wait*) found;
  static atomic_bool asked;
  if (!atomic_load(&asked)) {
    atomic_store(&found, (Wait*)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
    atomic_store(&asked, 1);
  }
  return atomic_load(&found);
}

static long long nanoseconds(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  Wait* own = own_wait();
  if (own != 0) return own(condition, mutex, clock, until);
  const long long end = until->tv_sec * 1000000000LL + until->tv_nsec;
  const long long there = nanoseconds(CLOCK_REALTIME) + end - nanoseconds(clock);
  const struct timespec told = {.tv_sec = there / 1000000000LL, .tv_nsec = there % 1000000000LL};
  const int result = pthread_cond_timedwait(condition, mutex, &told);
  return result == ETIMEDOUT && nanoseconds(clock) < end ? 0 : result;
}
