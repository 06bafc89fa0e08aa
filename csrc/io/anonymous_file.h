#pragma once

#include <string>
#include <utility>

#include "io/status.h"

namespace kvswap {

/// A file descriptor, closed with its owner.
class OwnedFd {
 public:
  explicit OwnedFd(int fd = -1) : fd_(fd) {}
  ~OwnedFd();
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept;

  int get() const { return fd_; }

 private:
  int fd_;
};

/// A new file (read and write, 0600, close-on-exec) that has no name in `directory`; name_file()
/// can give it one, and nothing else.
Result<OwnedFd> create_unnamed_file(const std::string& directory);

/// The same where the file system has no O_TMPFILE: created with a name that is removed at once.
/// Files of this kind that a process left there when it was killed in between are removed, too.
Result<OwnedFd> create_and_unlink_file(const std::string& directory);

}  // namespace kvswap
