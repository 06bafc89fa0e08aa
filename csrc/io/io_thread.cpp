#include "io/io_thread.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstdint>
#include <new>
#include <system_error>
#include <utility>

namespace kvswap {
namespace {

constexpr uint64_t kSliceNanoseconds = 100'000;

/// The kernel's struct sched_attr, which the C library does not have everywhere.
struct SchedulingAttributes {
  uint32_t size;
  uint32_t policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t slice_nanoseconds;
  uint64_t deadline;
  uint64_t period;
};

/// Since Linux 6.12 a thread with a shorter slice preempts one with a longer slice when it wakes.
/// Without that, a woken thread may wait for the 3 ms that a computing one is granted, and nothing
/// is read ahead. Older kernels take the request and change nothing.
void ask_for_short_slices() {
  if (::sched_getscheduler(0) != SCHED_OTHER) return;
  SchedulingAttributes attributes{};
  attributes.size = sizeof(attributes);
  attributes.policy = SCHED_OTHER;
  attributes.nice = ::getpriority(PRIO_PROCESS, 0);
  attributes.slice_nanoseconds = kSliceNanoseconds;
  (void)::syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace

Result<std::thread> start_io_thread(const std::string& name, std::function<void()> function) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  int error = 0;
  try {
    thread = std::thread([name, function = std::move(function)] {
      pthread_setname_np(pthread_self(), name.c_str());
      ask_for_short_slices();
      function();
    });
  } catch (const std::system_error& failure) {
    error = failure.code().value();
  } catch (const std::bad_alloc&) {
    error = ENOMEM;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error == 0) return thread;
  return Status::storage(name +
                             ": an I/O thread must start, but the system refused one more; "
                             "raise the limit on processes (ulimit -u)",
                         error);
}

Status OwnerProcess::check(const char* where) const {
  if (is_here()) return Status::ok();
  return Status::invalid(std::string(where) + ": must be called by the process that opened it (" +
                         std::to_string(pid_) + "), got its forked child " +
                         std::to_string(::getpid()) + "; open a new one after fork()");
}

}  // namespace kvswap
