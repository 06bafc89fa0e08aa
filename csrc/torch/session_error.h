#pragma once

#include <stdexcept>
#include <string>

namespace kvswap {

/// What the world or a limit refuses, worded "where: what must hold, what came, what to do".
/// Wrong arguments are c10::ValueError instead.
class SessionError : public std::runtime_error {
 public:
  enum class Kind {
    kBudget,   ///< kv_memory_bytes or disk_quota_bytes cannot hold it
    kStorage,  ///< a system call failed; error_number() is its errno
    kCorrupt,  ///< bytes came back that were not the ones written
    kClosed,   ///< the session was closed
  };

  SessionError(Kind kind, const std::string& message, int error_number = 0)
      : std::runtime_error(message), kind_(kind), error_number_(error_number) {}

  Kind kind() const { return kind_; }
  int error_number() const { return error_number_; }

 private:
  Kind kind_;
  int error_number_;
};

}  // namespace kvswap
