#include "io/file_bytes.h"

#include <cerrno>

#include "io/error_text.h"
#include "io/read_progress.h"
#include "io/syscalls.h"

namespace kvswap {

namespace {

constexpr int64_t kCallBytesMax = 64 << 20;

}  // namespace

Status read_exactly(int fd, int64_t offset_bytes, std::span<std::byte> target,
                    const std::string& name) {
  if (target.empty()) return Status::ok();
  iovec whole = {target.data(), target.size()};
  ReadProgress read(offset_bytes, {&whole, 1});
  while (true) {
    const ReadProgress::Call call = read.next_call(kCallBytesMax);
    const int64_t result =
        syscalls().preadv(fd, call.targets, call.targets_count, call.offset_bytes);
    const ReadProgress::Next next = read.apply(result, 1);
    if (next == ReadProgress::Next::kDone) return Status::ok();
    if (next == ReadProgress::Next::kFailed) break;
    if (read.needs_pause()) read.pause();
  }
  const int error = read.error_number();
  if (error == 0) {
    const int64_t end = offset_bytes + static_cast<int64_t>(target.size());
    return Status::corrupt(
        "open: " + name + " must have " + std::to_string(end) + " bytes, and ends before them",
        name);
  }
  return Status::storage(
      "open: " + name + " must be readable, got " + errno_text(error) + storage_hint(error), error,
      name);
}

Result<FileBytes> FileBytes::read(int fd, const Range& range, const std::string& name) {
  FileBytes file;
  if (range.length_bytes <= 0) return file;
  file.memory_ = std::make_unique<MappedMemory>(range.length_bytes, false);
  if (!file.memory_->is_there()) {
    return Status::storage("open: " + name + " must fit in memory, and " +
                               std::to_string(range.length_bytes) + " bytes of it do not, got " +
                               errno_text(ENOMEM) + storage_hint(ENOMEM),
                           ENOMEM, name);
  }
  const std::span target(file.memory_->data(), static_cast<size_t>(range.length_bytes));
  KVSWAP_RETURN_IF_ERROR(read_exactly(fd, range.offset_bytes, target, name));
  file.bytes_ = target;
  return file;
}

}  // namespace kvswap
