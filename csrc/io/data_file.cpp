#include "io/data_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "io/anonymous_file.h"
#include "io/error_text.h"
#include "io/file_system.h"
#include "io/io_thread.h"
#include "io/read_only_file.h"
#include "io/secure_erase.h"
#include "io/syscalls.h"

namespace kvswap {
namespace {

constexpr int64_t kSmallestAlignment = 512;
constexpr int kTransientErrorsMax = 300;  // in a row, a millisecond apart
constexpr int kPauseMicroseconds = 1000;
constexpr int64_t kDirtyBytesMax = 8 << 20;  // buffered only: what may wait in the page cache

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

Status check_options(const DataFileOptions& options) {
  if (options.extend_bytes < 1) {
    return Status::invalid("session file: extend_bytes must be at least 1, got " +
                           std::to_string(options.extend_bytes));
  }
  if (options.directory.find('\0') != std::string::npos) {
    return Status::invalid("session file: directory must be a path without a NUL byte, got one");
  }
  struct stat facts{};
  if (::stat(options.directory.c_str(), &facts) != 0) {
    const int error = errno;
    return Status(StatusCode::kInvalid,
                  "session file: directory must exist, got '" + options.directory +
                      "': " + errno_text(error) + "; create it or choose another path",
                  error)
        .with_path(options.directory);
  }
  if (!S_ISDIR(facts.st_mode)) {
    return Status(StatusCode::kInvalid,
                  "session file: path must be a directory, got '" + options.directory +
                      "', which is not one; choose another path",
                  ENOTDIR)
        .with_path(options.directory);
  }
  return Status::ok();
}

/// Sentences about a folder whose disk is none, or whose files others can reach.
std::vector<std::string> doubts_about(const std::string& directory) {
  // nfs, smb, cifs, smb2, 9p, ceph, afs, lustre, fuse (sshfs and many more)
  constexpr uint32_t kOnNetwork[] = {0x6969,     0x517b,     0xff534d42, 0xfe534d42, 0x01021997,
                                     0x00c36400, 0x5346414f, 0x0bd00bd0, 0x65735546};
  std::vector<std::string> doubts;
  struct statfs system{};
  if (::statfs(directory.c_str(), &system) == 0) {
    const auto type = static_cast<uint32_t>(system.f_type);
    if (keeps_in_memory(type)) {
      doubts.push_back("'" + directory + "' lies in memory: nothing is saved by keeping KV there.");
    }
    if (std::ranges::find(kOnNetwork, type) != std::end(kOnNetwork)) {
      doubts.push_back("'" + directory +
                       "' may lie on another machine: the text's KV leaves this one.");
    }
  }
  struct stat facts{};
  if (::stat(directory.c_str(), &facts) == 0 && (facts.st_mode & S_IWOTH) != 0 &&
      (facts.st_mode & S_ISVTX) == 0) {
    doubts.push_back("'" + directory +
                     "' is writable by everybody and has no sticky bit: others may remove or "
                     "replace it.");
  }
  return doubts;
}

/// Writes one block and reads it back: some file systems refuse O_DIRECT only then. 0 or errno.
int prove_block(int fd, int64_t alignment) {
  struct Free {
    void operator()(void* block) const { std::free(block); }
  };
  const auto size = static_cast<size_t>(alignment);
  const std::unique_ptr<void, Free> written(std::aligned_alloc(size, size));
  const std::unique_ptr<void, Free> read(std::aligned_alloc(size, size));
  if (!written || !read) return ENOMEM;
  std::memset(written.get(), 0x5a, size);
  std::memset(read.get(), 0, size);
  const iovec target = {read.get(), size};
  int64_t count = syscalls().pwrite(fd, written.get(), size, 0);
  if (count >= 0) count = syscalls().preadv(fd, &target, 1, 0);
  if (count < 0) return static_cast<int>(-count);
  if (count != alignment) return EIO;
  return std::memcmp(written.get(), read.get(), size) == 0 ? 0 : EIO;
}

class AnonymousFile final : public DataFile {
 public:
  AnonymousFile(OwnedFd fd, const DataFileOptions& options)
      : fd_(std::move(fd)), options_(options) {}
  ~AnonymousFile() override {
    if (!owner_.is_here() || is_kept_) return;
    if (options_.is_wiped) {
      wipe_at_end(fd_.get(), written_end_bytes_,
                  "the session file in '" + options_.directory + "'");
    }
    // Another holder of the file, for a moment, keeps no space.
    (void)syscalls().ftruncate(fd_.get(), 0);
  }

  void choose_preallocation() {
    if (syscalls().fallocate(fd_.get(), 0, 0, kSmallestAlignment) != -EOPNOTSUPP) return;
    preallocates_ = false;
    add_fallback("Preallocation is refused in '" + options_.directory +
                 "': a full disk is noticed only when a write fails.");
  }

  Status choose_mode();

  void add_fallback(std::string sentence) { fallbacks_.push_back(std::move(sentence)); }

  int fd() const override { return fd_.get(); }
  bool is_direct() const override { return direct_; }
  int64_t alignment_bytes() const override { return alignment_; }
  const std::string& directory() const override { return options_.directory; }
  const std::vector<std::string>& fallbacks() const override { return fallbacks_; }
  int64_t allocated_bytes() const override { return allocated_.load(std::memory_order_acquire); }

  Status reserve(int64_t size_bytes) override;
  Status write(int64_t offset_bytes, std::span<const std::byte> bytes) override;
  void drop_cached(int64_t offset_bytes, int64_t length_bytes) override;
  Status shrink(int64_t size_bytes) override;
  void keep() override { is_kept_ = true; }

 private:
  int try_direct();
  int allocate_up_to(int64_t size_bytes);
  Status check_nothing_lost() const;
  Status no_space(int64_t needed_bytes, int error_number) const;

  OwnedFd fd_;
  OwnerProcess owner_;
  DataFileOptions options_;
  bool direct_ = false;
  int64_t alignment_ = kSmallestAlignment;
  std::vector<std::string> fallbacks_;
  std::mutex reserve_mutex_;
  std::atomic<int64_t> allocated_{0};
  bool preallocates_ = true;
  bool is_kept_ = false;
  std::atomic<int> lost_error_{0};  // of bytes that write() took and that the disk did not
  int64_t dirty_bytes_ = 0;
  int64_t written_end_bytes_ = 0;
};

Status AnonymousFile::choose_mode() {
  const int error = options_.mode == IoMode::kBuffered ? 0 : try_direct();
  if (error == ENOSPC) return no_space(alignment_, error);
  if (error != 0) {
    const std::string sentence =
        "O_DIRECT is refused in '" + options_.directory + "' (" + errno_text(error) + ")";
    if (options_.mode == IoMode::kDirect) {
      return Status::storage(
          "session file: the file system must take O_DIRECT because the mode "
          "is direct, but " +
              sentence + "; use mode auto or buffered, or choose another path",
          error, options_.directory);
    }
    add_fallback(sentence + ": buffered I/O is used, which costs more CPU.");
  }
  // Selected groups lie scattered: read-ahead would fetch what nobody asked for.
  if (!direct_) (void)::posix_fadvise(fd_.get(), 0, 0, POSIX_FADV_RANDOM);
  return Status::ok();
}

int AnonymousFile::try_direct() {
  const int64_t alignment = direct_alignment(fd_.get());
  if (alignment == 0) return EOPNOTSUPP;
  const int flags = ::fcntl(fd_.get(), F_GETFL);
  int error = ::fcntl(fd_.get(), F_SETFL, flags | O_DIRECT) == 0 ? 0 : errno;
  if (error == 0) error = prove_block(fd_.get(), alignment);
  direct_ = error == 0;
  if (direct_) {
    alignment_ = alignment;
  } else {
    (void)::fcntl(fd_.get(), F_SETFL, flags);
  }
  return error;
}

Status AnonymousFile::no_space(int64_t needed_bytes, int error_number) const {
  const Result<int64_t> free = free_bytes(options_.directory);
  const std::string left = free.is_ok() ? std::to_string(free.value()) : "an unknown number of";
  return Status::storage("session file: '" + options_.directory + "' must have room for " +
                             std::to_string(needed_bytes) + " bytes more, but " + left +
                             " bytes are free: " + errno_text(error_number) +
                             "; free space, choose another path or lower the context",
                         error_number, options_.directory);
}

int AnonymousFile::allocate_up_to(int64_t size_bytes) {
  const int64_t allocated = allocated_.load(std::memory_order_relaxed);
  int result = 0;
  int attempts = 0;
  do {
    result = preallocates_ ? syscalls().fallocate(fd_.get(), 0, allocated, size_bytes - allocated)
                           : syscalls().ftruncate(fd_.get(), size_bytes);
  } while (result == -EINTR && ++attempts < kTransientErrorsMax);
  if (result == 0) {
    allocated_.store(size_bytes, std::memory_order_release);
    return 0;
  }
  (void)syscalls().ftruncate(fd_.get(), allocated);  // a failed fallocate may have taken a part
  return -result;
}

Status AnonymousFile::reserve(int64_t size_bytes) {
  const std::lock_guard lock(reserve_mutex_);
  const int64_t allocated = allocated_.load(std::memory_order_relaxed);
  if (size_bytes <= allocated) return Status::ok();
  if (options_.quota_bytes >= 0 && size_bytes > options_.quota_bytes) {
    return Status::budget("session file: it must stay within its quota of " +
                          std::to_string(options_.quota_bytes) + " bytes, but " +
                          std::to_string(size_bytes) +
                          " are needed; raise the quota or lower the context");
  }
  int64_t ahead = round_up(size_bytes, std::max(options_.extend_bytes, alignment_));
  if (options_.quota_bytes >= 0) ahead = std::min(ahead, options_.quota_bytes);
  int error = allocate_up_to(ahead);
  if (error != 0 && ahead > size_bytes) error = allocate_up_to(size_bytes);
  if (error == 0) return Status::ok();
  if (error == ENOSPC) return no_space(size_bytes - allocated, error);
  return Status::storage("session file: the one in '" + options_.directory + "' must grow to " +
                             std::to_string(size_bytes) + " bytes, got " + errno_text(error) +
                             storage_hint(error),
                         error, options_.directory);
}

Status AnonymousFile::write(int64_t offset_bytes, std::span<const std::byte> bytes) {
  KVSWAP_RETURN_IF_ERROR(check_nothing_lost());
  const int64_t end = offset_bytes + static_cast<int64_t>(bytes.size());
  KVSWAP_RETURN_IF_ERROR(reserve(end));
  written_end_bytes_ = std::max(written_end_bytes_, end);
  size_t done = 0;
  int attempts = 0;
  while (done < bytes.size()) {
    const int64_t at = offset_bytes + static_cast<int64_t>(done);
    const int64_t count =
        syscalls().pwrite(fd_.get(), bytes.data() + done, bytes.size() - done, at);
    if (count > 0) {
      done += static_cast<size_t>(count);
      attempts = 0;
      continue;
    }
    const int error = count == 0 ? EIO : static_cast<int>(-count);
    if ((error == EINTR || error == EAGAIN) && ++attempts < kTransientErrorsMax) {
      ::usleep(kPauseMicroseconds);
      continue;
    }
    if (error == ENOSPC) {
      return no_space(static_cast<int64_t>(bytes.size() - done), error);
    }
    return Status::storage("session file: " + std::to_string(bytes.size() - done) +
                               " bytes at offset " + std::to_string(at) +
                               " of the session file in '" + options_.directory +
                               "' must be written, got " + errno_text(error) + storage_hint(error),
                           error, options_.directory);
  }
  dirty_bytes_ += static_cast<int64_t>(bytes.size());
  if (!direct_ && dirty_bytes_ >= kDirtyBytesMax) {
    drop_cached(0, 0);
    dirty_bytes_ = 0;
  }
  return check_nothing_lost();
}

Status AnonymousFile::check_nothing_lost() const {
  const int error = lost_error_;
  if (error == 0) return Status::ok();
  return Status::storage("session file: what was written to the one in '" + options_.directory +
                             "' must reach the disk, got " + errno_text(error) +
                             storage_hint(error) +
                             "; records are lost, of which nothing was used: close the cache",
                         error, options_.directory);
}

void AnonymousFile::drop_cached(int64_t offset_bytes, int64_t length_bytes) {
  if (direct_) return;
  // Dirty pages are not dropped, so they are written first. Only this call hears what became of
  // them; where it is not known, they are written in the kernel's own time.
  const int error = -syscalls().write_back(fd_.get(), offset_bytes, length_bytes);
  if (error != 0 && error != ENOSYS && error != EINVAL && error != ESPIPE) lost_error_ = error;
  (void)::posix_fadvise(fd_.get(), offset_bytes, length_bytes, POSIX_FADV_DONTNEED);
}

Status AnonymousFile::shrink(int64_t size_bytes) {
  KVSWAP_RETURN_IF_ERROR(check_nothing_lost());
  const std::lock_guard lock(reserve_mutex_);
  int error = 0;
  if (options_.is_wiped && size_bytes < written_end_bytes_) {
    error = overwrite_with_zeros(fd_.get(), size_bytes, written_end_bytes_ - size_bytes);
  }
  if (error == 0) error = -syscalls().ftruncate(fd_.get(), size_bytes);
  if (error != 0) {
    return Status::storage("the session file in '" + options_.directory + "' must be cut to " +
                               std::to_string(size_bytes) + " bytes, got " + errno_text(error) +
                               storage_hint(error),
                           error, options_.directory);
  }
  allocated_.store(size_bytes, std::memory_order_release);
  written_end_bytes_ = std::min(written_end_bytes_, size_bytes);
  return Status::ok();
}

}  // namespace

std::optional<IoMode> parse_io_mode(std::string_view word) {
  if (word == "auto") return IoMode::kAuto;
  if (word == "direct") return IoMode::kDirect;
  if (word == "buffered") return IoMode::kBuffered;
  return std::nullopt;
}

Result<std::unique_ptr<DataFile>> DataFile::open(const DataFileOptions& options) {
  KVSWAP_RETURN_IF_ERROR(check_options(options));
  std::string fallback;
  Result<OwnedFd> fd = create_unnamed_file(options.directory);
  if (!fd.is_ok() && fd.status().code() == StatusCode::kStorage) {
    const std::string reason = errno_text(fd.status().error_number());
    fd = create_and_unlink_file(options.directory);
    fallback = "O_TMPFILE is refused in '" + options.directory + "' (" + reason +
               "): the session file had a name for a moment.";
  }
  if (!fd.is_ok()) return fd.status();
  auto file = std::make_unique<AnonymousFile>(std::move(fd.value()), options);
  if (!fallback.empty()) file->add_fallback(std::move(fallback));
  for (std::string& doubt : doubts_about(options.directory)) file->add_fallback(std::move(doubt));
  file->choose_preallocation();
  KVSWAP_RETURN_IF_ERROR(file->choose_mode());
  return std::unique_ptr<DataFile>(std::move(file));
}

Result<int64_t> free_bytes(const std::string& directory) {
  struct statvfs facts{};
  if (::statvfs(directory.c_str(), &facts) != 0) {
    const int error = errno;
    return Status::storage("free_bytes: '" + directory +
                               "' must be on a mounted file system, got " + errno_text(error),
                           error, directory);
  }
  return static_cast<int64_t>(facts.f_bavail) * static_cast<int64_t>(facts.f_frsize);
}

}  // namespace kvswap
