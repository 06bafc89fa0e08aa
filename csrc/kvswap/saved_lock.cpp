#include "kvswap/saved_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>

#include "io/error_text.h"
#include "io/syscalls.h"
#include "kvswap/atomic_directory.h"

namespace kvswap {
namespace {

constexpr int kLockAttempts = 50;
constexpr int kLockPauseMicroseconds = 10000;
constexpr int kRacesMax = 50;

Status in_use(const std::string& path) {
  return Status(StatusCode::kInvalid,
                "saved cache " + path +
                    ": must be used by nobody to be replaced or removed, and is open in this or "
                    "another process; close it there first",
                EBUSY)
      .with_path(path);
}

bool is_same(const struct stat& one, const struct stat& other) {
  return one.st_ino == other.st_ino && one.st_dev == other.st_dev;
}

/// The file that is locked; none where it is no file that could be opened.
Result<OwnedFd> open_records(int folder, const std::string& path) {
  // Not to wait for the writer of a pipe of that name.
  const int fd =
      syscalls().open_at(folder, kRecordsFile, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0);
  if (fd == -ENOENT || fd == -ELOOP || fd == -ENXIO) return OwnedFd();
  if (fd < 0) return saved_failure(path, std::string(kRecordsFile) + " must be readable", -fd);
  OwnedFd records(fd);
  struct stat facts{};
  const int known = syscalls().facts(fd, &facts);
  if (known != 0)
    return saved_failure(path, std::string(kRecordsFile) + " must be readable", -known);
  if (!S_ISREG(facts.st_mode)) return OwnedFd();
  return records;
}

/// Waits a moment: the kernel takes one to close what a process has left that used io_uring.
bool lock_records(int fd) {
  for (int attempt = 0; ::flock(fd, LOCK_EX | LOCK_NB) != 0; ++attempt) {
    if (attempt == kLockAttempts) return false;
    ::usleep(kLockPauseMicroseconds);
  }
  return true;
}

Status is_gone(const std::string& path) {
  return Status(StatusCode::kInvalid, "saved cache " + path + ": must be there, and is not", ENOENT)
      .with_path(path);
}

/// Is that open folder what has the name?
bool has_name(int parent, const std::string& name, int folder) {
  struct stat held{};
  struct stat named{};
  return syscalls().facts(folder, &held) == 0 &&
         syscalls().facts_at(parent, name.c_str(), &named, AT_SYMLINK_NOFOLLOW) == 0 &&
         is_same(held, named);
}

}  // namespace

OwnLocks::OwnLocks(std::span<const int> own, const struct stat& file) {
  for (const int fd : own) {
    struct stat facts{};
    if (fd >= 0 && syscalls().facts(fd, &facts) == 0 && is_same(facts, file)) fds_.push_back(fd);
  }
  for (const int fd : fds_) (void)::flock(fd, LOCK_UN);
}

OwnLocks::~OwnLocks() {
  for (const int fd : fds_) (void)::flock(fd, LOCK_SH | LOCK_NB);
}

Status saved_failure(const std::string& path, const std::string& must, int error) {
  const std::string hint =
      error == ENOSPC ? "; free space on its disk, or save to another" : storage_hint(error);
  return Status::storage("saved cache " + path + ": " + must + ", got " + errno_text(error) + hint,
                         error, path);
}

Result<Alone> lock_alone(int parent, const std::string& name, const std::string& path,
                         std::span<const int> own) {
  for (int attempt = 0; attempt < kRacesMax; ++attempt) {
    const int opened = syscalls().open_at(parent, name.c_str(),
                                          O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
    if (opened == -ENOENT) return is_gone(path);
    if (opened < 0) return saved_failure(path, "must be a folder", -opened);
    const OwnedFd folder(opened);
    struct stat facts{};
    const int known = syscalls().facts_at(opened, kManifestFile, &facts, AT_SYMLINK_NOFOLLOW);
    if (known != 0 && known != -ENOENT) {
      return saved_failure(path, std::string(kManifestFile) + " must be readable", -known);
    }
    if (known == -ENOENT) {
      if (!has_name(parent, name, opened)) continue;  // somebody removes it
      return Status(StatusCode::kInvalid,
                    "saved cache " + path +
                        ": must be a saved cache to be replaced or removed, and "
                        "has no manifest.json; choose another path",
                    EEXIST)
          .with_path(path);
    }
    auto records = open_records(opened, path);
    if (!records.is_ok()) return records.status();
    Alone alone;
    alone.records = std::move(records.value());
    if (alone.records.get() >= 0) {
      if (syscalls().facts(alone.records.get(), &facts) == 0) alone.own = OwnLocks(own, facts);
      if (!lock_records(alone.records.get())) return in_use(path);
    }
    if (has_name(parent, name, opened)) return alone;
  }
  return saved_failure(path, "must stay for a moment, and others replace it again and again",
                       EBUSY);
}

}  // namespace kvswap
