// Where a fatal signal struck, below Python: tests/conftest.py loads this library. Python's own
// faulthandler shows Python's frames only, and none of a thread that is not Python's.

#include <execinfo.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>

namespace {

int output = 2;
std::array<struct sigaction, 65> earlier;

void show_stack(int number) {
  std::array<char, 80> title;
  const int length =
      std::snprintf(title.data(), title.size(), "\nnative stack: signal %d, task %ld\n", number,
                    ::syscall(SYS_gettid));
  (void)!::write(output, title.data(), length);
  std::array<void*, 64> frames;
  ::backtrace_symbols_fd(frames.data(), ::backtrace(frames.data(), frames.size()), output);
  // Then as if this handler had not been there.
  ::sigaction(number, &earlier[number], nullptr);
  ::raise(number);
}

}  // namespace

/// Writes to this descriptor from now on, before the handlers that were there.
extern "C" void show_native_stacks(int descriptor) {
  output = descriptor;
  std::array<void*, 1> first;
  ::backtrace(first.data(), first.size());  // loads libgcc now: a handler must not allocate
  struct sigaction action = {};
  action.sa_handler = show_stack;
  action.sa_flags = SA_ONSTACK | SA_NODEFER;
  for (const int number : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL}) {
    ::sigaction(number, &action, &earlier[number]);
  }
}
