#pragma once

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

namespace kvswap {

/// What went wrong, in the three voices that callers tell apart.
enum class StatusCode {
  kOk,
  kInvalid,  ///< The caller is wrong: a bad argument or a call out of turn.
  kBudget,   ///< The memory budget or the disk quota cannot hold what was asked.
  kStorage,  ///< The world is wrong: a system call failed.
  kCorrupt,  ///< Bytes came back that were not the ones written.
  kDropped,  ///< What was asked for is gone for good, as was wished when it was opened.
  kLate,  ///< The disk hangs: what was waited for is still in flight, and may be waited for again.
  kInterrupted,  ///< The call was asked to end: as kLate, nothing is lost.
};

/// The outcome of an operation that the world can make fail. It must be looked at.
///
/// `message` is a whole sentence for a person: where, what must hold, what came and, where known,
/// what to do. `error_number` is the errno of a failed system call, or the one that says the same;
/// else 0.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message, int error_number = 0)
      : code_(code), error_number_(error_number), message_(std::move(message)) {}

  static Status ok() { return {}; }
  static Status invalid(std::string message) { return {StatusCode::kInvalid, std::move(message)}; }
  static Status budget(std::string message) { return {StatusCode::kBudget, std::move(message)}; }
  static Status corrupt(std::string message, std::string path) {
    return Status(StatusCode::kCorrupt, std::move(message), EIO).with_path(std::move(path));
  }
  static Status storage(std::string message, int error_number, std::string path = "") {
    return Status(StatusCode::kStorage, std::move(message), error_number)
        .with_path(std::move(path));
  }

  static Status late(std::string message) {
    return {StatusCode::kLate, std::move(message), ETIMEDOUT};
  }
  /// error_number: ECANCELED by close(), EINTR by a signal.
  static Status interrupted(std::string message, int error_number) {
    return {StatusCode::kInterrupted, std::move(message), error_number};
  }

  bool is_ok() const { return code_ == StatusCode::kOk; }
  /// What was waited for has not ended: its memory is not to be used, and it is to be waited for.
  bool is_pending() const {
    return code_ == StatusCode::kLate || code_ == StatusCode::kInterrupted;
  }
  StatusCode code() const { return code_; }
  int error_number() const { return error_number_; }
  const std::string& message() const { return message_; }
  /// The folder or file that it is about; empty where it is about none.
  const std::string& path() const { return path_; }
  Status with_path(std::string path) && {
    path_ = std::move(path);
    return std::move(*this);
  }

 private:
  StatusCode code_ = StatusCode::kOk;
  int error_number_ = 0;
  std::string message_;
  std::string path_;
};

/// Prints the place and ends the process: only our own mistakes come here.
[[noreturn]] inline void assertion_failed(const char* expression, const char* file, int line) {
  std::fprintf(stderr, "kvswap: internal error: %s does not hold (%s:%d)\n", expression, file,
               line);
  std::abort();
}

#define KVSWAP_ASSERT(expression) \
  ((expression) ? void(0) : ::kvswap::assertion_failed(#expression, __FILE__, __LINE__))

#define KVSWAP_RETURN_IF_ERROR(expression)              \
  do {                                                  \
    ::kvswap::Status kvswap_status_ = (expression);     \
    if (!kvswap_status_.is_ok()) return kvswap_status_; \
  } while (false)

/// A value or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) { KVSWAP_ASSERT(!status_.is_ok()); }

  bool is_ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() {
    KVSWAP_ASSERT(value_.has_value());
    return *value_;
  }
  const T& value() const {
    KVSWAP_ASSERT(value_.has_value());
    return *value_;
  }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace kvswap
