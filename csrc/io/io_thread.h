#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <thread>

#include "io/status.h"

namespace kvswap {

/// Starts a thread of ours: named for `top` and debuggers (15 characters at most), with every
/// signal blocked, so that the program's handlers run on the program's own threads, and scheduled
/// in short slices, so that it starts reads at once although all cores compute.
Result<std::thread> start_io_thread(const std::string& name, std::function<void()> function);

/// Remembers which process made an object whose threads do not survive fork().
class OwnerProcess {
 public:
  bool is_here() const { return ::getpid() == pid_; }

  /// kInvalid, naming the call, in a forked child.
  Status check(const char* where) const;

 private:
  pid_t pid_ = ::getpid();
};

}  // namespace kvswap
