#include "io/read_progress.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "io/error_text.h"

namespace kvswap {
namespace {

// In a row, with pauses that add up to a second: EAGAIN for ever must not become a hang.
constexpr int kTransientErrorsMax = 1000;
constexpr int kErrorsWithoutPause = 10;
constexpr int kPauseMicroseconds = 1000;
constexpr int kIoErrorsMax = 1;

}  // namespace

ReadProgress::ReadProgress(int64_t offset_bytes, std::span<iovec> targets)
    : offset_bytes_(offset_bytes), targets_(targets) {
  for (const iovec& target : targets) missing_bytes_ += static_cast<int64_t>(target.iov_len);
}

ReadProgress::Call ReadProgress::next_call(int64_t call_bytes_max) {
  KVSWAP_ASSERT(!targets_.empty());
  const auto limit = static_cast<size_t>(call_bytes_max);
  if (targets_.front().iov_len > limit) {
    partial_ = {targets_.front().iov_base, limit};
    return {offset_bytes_, &partial_, 1};
  }
  if (missing_bytes_ <= call_bytes_max) {
    return {offset_bytes_, targets_.data(), static_cast<int>(targets_.size())};
  }
  size_t bytes = 0;
  size_t count = 0;
  while (bytes + targets_[count].iov_len <= limit) bytes += targets_[count++].iov_len;
  return {offset_bytes_, targets_.data(), static_cast<int>(count)};
}

bool ReadProgress::needs_pause() const { return transient_errors_ > kErrorsWithoutPause; }

void ReadProgress::pause() { ::usleep(kPauseMicroseconds); }

void ReadProgress::advance(int64_t bytes) {
  offset_bytes_ += bytes;
  missing_bytes_ -= bytes;
  auto left = static_cast<size_t>(bytes);
  while (left > 0) {
    iovec& target = targets_.front();
    const size_t taken = std::min(left, target.iov_len);
    target.iov_base = static_cast<std::byte*>(target.iov_base) + taken;
    target.iov_len -= taken;
    left -= taken;
    if (target.iov_len == 0) targets_ = targets_.subspan(1);
  }
}

ReadProgress::Next ReadProgress::apply(int64_t result, int64_t alignment_bytes) {
  // More than was asked for is no answer that a kernel gives.
  if (result > missing_bytes_) result = -EIO;
  if (result > 0) {
    advance(result);
    transient_errors_ = 0;
    if (missing_bytes_ == 0) return Next::kDone;
    if (result % alignment_bytes == 0) return Next::kCallAgain;
    error_number_ = 0;
    return Next::kFailed;
  }
  error_number_ = static_cast<int>(-result);
  const bool transient = error_number_ == EINTR || error_number_ == EAGAIN;
  if (transient && ++transient_errors_ <= kTransientErrorsMax) return Next::kCallAgain;
  if (error_number_ == EIO && ++io_errors_ <= kIoErrorsMax) return Next::kCallAgain;
  return Next::kFailed;
}

Status ReadProgress::failure(const std::string& directory) const {
  const std::string what = std::to_string(missing_bytes_) + " bytes at offset " +
                           std::to_string(offset_bytes_) + " of the session file in '" + directory +
                           "'";
  if (error_number_ == 0) {
    return Status::storage("read: " + what + " must lie within the file, but it ends before them" +
                               "; it was truncated, or they were never written",
                           ENODATA, directory);
  }
  return Status::storage("read: " + what + " must be readable, got " + errno_text(error_number_) +
                             storage_hint(error_number_),
                         error_number_, directory);
}

}  // namespace kvswap
