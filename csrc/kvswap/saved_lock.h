#pragma once

#include <sys/stat.h>

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/anonymous_file.h"
#include "io/status.h"

namespace kvswap {

/// The saver's own locks on a file that it stands on: put off while this lives, since the saver is
/// not somebody else.
class OwnLocks {
 public:
  OwnLocks() = default;
  /// Of those open files that are this one.
  OwnLocks(std::span<const int> own, const struct stat& file);
  ~OwnLocks();
  OwnLocks(OwnLocks&& other) noexcept : fds_(std::exchange(other.fds_, {})) {}
  OwnLocks& operator=(OwnLocks&& other) noexcept {
    std::swap(fds_, other.fds_);
    return *this;
  }

 private:
  std::vector<int> fds_;
};

/// The lock of a saved cache that nobody else uses. Own locks come back when the lock is gone.
struct Alone {
  OwnLocks own;
  OwnedFd records;  // none: nobody can have it open
};

/// Holds the lock of one that is there, under that name, and is no more than a saved cache. ENOENT:
/// nothing has the name, any more perhaps.
Result<Alone> lock_alone(int parent, const std::string& name, const std::string& path,
                         std::span<const int> own);

/// kStorage: what must hold of a saved cache's folder, and what came.
Status saved_failure(const std::string& path, const std::string& must, int error);

}  // namespace kvswap
