#pragma once

#include <stdexcept>
#include <string>

namespace kvswap {

// All messages are worded "where: what must hold, what came, what to do". A wrong argument is
// std::invalid_argument from a Cache and c10::ValueError from a TensorCache.

/// A setting, a config file, a projection file or another model's: the caller's to mend.
class ConfigError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// What the world or a limit refuses.
class SessionError : public std::runtime_error {
 public:
  enum class Kind {
    kBudget,       ///< kv_memory_bytes or disk_quota_bytes cannot hold it
    kStorage,      ///< a system call failed; error_number() is its errno
    kCorrupt,      ///< bytes came back that were not the ones written
    kClosed,       ///< the session was closed
    kBusy,         ///< another thread is in a call
    kInterrupted,  ///< the call was asked to end while it waited for the disk
    kDropped,      ///< tokens that a session without a directory has dropped for good
  };

  SessionError(Kind kind, const std::string& message, int error_number = 0,
               const std::string& path = "")
      : std::runtime_error(message), kind_(kind), error_number_(error_number), path_(path) {}

  Kind kind() const { return kind_; }
  int error_number() const { return error_number_; }
  /// The folder or file that it is about; empty where it is about none.
  const std::string& path() const { return path_; }

 private:
  Kind kind_;
  int error_number_;
  std::string path_;
};

}  // namespace kvswap
