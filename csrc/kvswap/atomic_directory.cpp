#include "kvswap/atomic_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <random>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "io/error_text.h"
#include "io/failure.h"
#include "io/syscalls.h"
#include "kvswap/saved_lock.h"

namespace kvswap {
namespace {

constexpr size_t kRandomLength = 16;  // nobody else has such a name
constexpr size_t kNameBytesMax = 230;
constexpr int kRacesMax = 50;
constexpr const char* kFiles[] = {kManifestFile, kStateFile, kRecordsFile};

/// "a/b.kvswap/" -> "a", "b.kvswap".
Result<std::pair<std::string, std::string>> split(std::string path) {
  const std::string given = path;
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  const size_t slash = path.rfind('/');
  const std::string parent = slash == std::string::npos ? "."
                             : slash == 0               ? "/"
                                                        : path.substr(0, slash);
  const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
  if (name.empty() || name == "." || name == ".." || name.size() > kNameBytesMax ||
      given.find('\0') != std::string::npos) {
    return Status::invalid("saved cache: path must name a folder in at most " +
                           std::to_string(kNameBytesMax) + " bytes without NUL, got '" +
                           given.substr(0, given.find('\0')) + "'");
  }
  return std::pair(parent, name);
}

std::string hidden_prefix(const std::string& name) { return "." + name + "."; }

std::string hidden_name(const std::string& name) {
  static constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz0123456789";
  std::random_device random;
  std::string hidden = hidden_prefix(name);
  for (size_t i = 0; i < kRandomLength; ++i) hidden += kLetters[random() % kLetters.size()];
  return hidden;
}

/// Only the files of a saved cache: anything else stays, and the folder with it.
int remove_folder(int parent, const std::string& name) {
  const OwnedFd folder(
      ::openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (folder.get() < 0) return -errno;
  for (const char* file : kFiles) {
    if (::unlinkat(folder.get(), file, 0) != 0 && errno != ENOENT) return -errno;
  }
  return ::unlinkat(parent, name.c_str(), AT_REMOVEDIR) == 0 ? 0 : -errno;
}

/// Folders that a killed process has left; one that somebody fills is locked.
void remove_left_folders(int parent, const std::string& name) {
  const std::string prefix = hidden_prefix(name);
  const int copy = ::openat(parent, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* entries = copy < 0 ? nullptr : ::fdopendir(copy);
  if (entries == nullptr) return;
  while (const dirent* entry = ::readdir(entries)) {
    const std::string found = entry->d_name;
    if (found.size() != prefix.size() + kRandomLength || !found.starts_with(prefix)) continue;
    const OwnedFd folder(
        ::openat(parent, found.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (folder.get() < 0 || ::flock(folder.get(), LOCK_EX | LOCK_NB) != 0) continue;
    (void)remove_folder(parent, found);
  }
  ::closedir(entries);
}

OwnedFd open_new_folder(int parent, const char* name) {
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  OwnedFd folder(::openat(parent, name, kFlags));
  if (folder.get() >= 0 || errno != EACCES) return folder;
  // A umask may have taken what its owner needs.
  if (::fchmodat(parent, name, 0700, 0) != 0) return OwnedFd();
  return OwnedFd(::openat(parent, name, kFlags));
}

/// Locks a new folder that still has its name: another process locks one before it removes it. A
/// file system without locks has none to lose.
bool is_locked_under(int parent, const char* name, int folder) {
  struct stat there{};
  if (::flock(folder, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
  return syscalls().facts_at(parent, name, &there, AT_SYMLINK_NOFOLLOW) != -ENOENT;
}

Result<OwnedFd> open_parent(const std::string& path) {
  const int fd = syscalls().open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd >= 0) return OwnedFd(fd);
  return Status(StatusCode::kInvalid,
                "saved cache: its parent folder must exist, got '" + path +
                    "': " + errno_text(-fd) + "; create it or choose another path",
                -fd)
      .with_path(path);
}

}  // namespace

Result<std::unique_ptr<AtomicDirectory>> AtomicDirectory::create(const std::string& target,
                                                                 Existing existing,
                                                                 std::span<const int> own) {
  auto parts = split(target);
  if (!parts.is_ok()) return parts.status();
  std::unique_ptr<AtomicDirectory> staged(new AtomicDirectory(target, existing, own));
  auto parent = open_parent(parts.value().first);
  if (!parent.is_ok()) return parent.status();
  staged->parent_ = std::move(parent.value());
  staged->name_ = parts.value().second;
  const int at = staged->parent_.get();
  struct stat there{};
  const int known = syscalls().facts_at(at, staged->name_.c_str(), &there, AT_SYMLINK_NOFOLLOW);
  if (known != 0 && known != -ENOENT) return saved_failure(target, "must be readable", -known);
  if (known == 0) {
    if (existing == Existing::kRefuse) {
      return Status(StatusCode::kInvalid,
                    "save: '" + target +
                        "' must not exist, and does; choose another path, remove "
                        "it with kvswap rm, or pass overwrite",
                    EEXIST)
          .with_path(target);
    }
    auto locked = lock_alone(at, staged->name_, target, own);
    if (!locked.is_ok() && locked.status().error_number() != ENOENT) return locked.status();
  }
  remove_left_folders(at, staged->name_);
  for (int attempt = 0;; ++attempt) {
    staged->staged_name_ = hidden_name(staged->name_);
    const char* hidden = staged->staged_name_.c_str();
    const int made = syscalls().make_folder(at, hidden, 0700);
    if (made < 0) {
      staged->staged_name_.clear();
      return saved_failure(target, "its parent folder must take a new one", -made);
    }
    staged->folder_ = open_new_folder(at, hidden);
    const int failed = staged->fd() < 0 || ::fchmod(staged->fd(), 0700) != 0 ? errno : 0;
    if (failed == 0 && is_locked_under(at, hidden, staged->fd())) return staged;
    // Until it is locked, another process that saves here takes it for one that was left.
    if (attempt == kRacesMax || (failed != 0 && failed != ENOENT)) {
      return saved_failure(target, "a new folder must be usable", failed != 0 ? failed : EBUSY);
    }
  }
}

AtomicDirectory::~AtomicDirectory() {
  if (!staged_name_.empty()) (void)remove_folder(parent_.get(), staged_name_);
}

Result<OwnedFd> AtomicDirectory::create_file(const char* name) {
  const int fd = syscalls().open_at(this->fd(), name,
                                    O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) return saved_failure(target_, std::string(name) + " must be made", -fd);
  OwnedFd file(fd);
  if (::fchmod(fd, 0600) != 0)
    return saved_failure(target_, std::string(name) + " must be ours", errno);
  return file;
}

Status AtomicDirectory::finish_file(int fd, const char* name) {
  const int synced = syscalls().fsync(fd);
  if (synced == 0) return Status::ok();
  return saved_failure(target_, std::string(name) + " must reach the disk", -synced);
}

Status AtomicDirectory::publish() {
  const int synced = syscalls().fsync(fd());
  if (synced != 0) return saved_failure(target_, "the folder must reach the disk", -synced);
  const char* from = staged_name_.c_str();
  int renamed = syscalls().rename(parent_.get(), from, name_.c_str(), RENAME_NOREPLACE);
  for (int attempt = 0; renamed == -EEXIST && existing_ == Existing::kReplace; ++attempt) {
    Status replaced = replace();
    if (replaced.error_number() != ENOENT || attempt == kRacesMax) return replaced;
    // Somebody has removed it meanwhile.
    renamed = syscalls().rename(parent_.get(), from, name_.c_str(), RENAME_NOREPLACE);
  }
  if (renamed == -EINVAL || renamed == -ENOSYS) {
    // Without the flag a folder that is not empty is not replaced either.
    renamed = syscalls().rename(parent_.get(), from, name_.c_str(), 0);
  }
  if (renamed != 0)
    return saved_failure(target_, "must take its name, which nothing has", -renamed);
  staged_name_ = name_;  // what is not durable is taken back
  const int durable = syscalls().fsync(parent_.get());
  if (durable != 0)
    return saved_failure(target_, "its parent folder must reach the disk", -durable);
  staged_name_.clear();
  return Status::ok();
}

Status AtomicDirectory::replace() {
  auto lock = lock_alone(parent_.get(), name_, target_, own_);
  if (!lock.is_ok()) return lock.status();
  const int exchanged =
      syscalls().rename(parent_.get(), staged_name_.c_str(), name_.c_str(), RENAME_EXCHANGE);
  if (exchanged != 0) {
    return saved_failure(target_, "its file system must exchange two folders; save to another path",
                         -exchanged);
  }
  const int durable = syscalls().fsync(parent_.get());
  if (durable != 0) {
    // The old one comes back, and the new one goes with this object.
    const int back =
        syscalls().rename(parent_.get(), staged_name_.c_str(), name_.c_str(), RENAME_EXCHANGE);
    if (back != 0) staged_name_.clear();  // it stays where it is
    return saved_failure(target_, "its parent folder must reach the disk", -durable);
  }
  // What stands under the hidden name is the old one.
  (void)remove_folder(parent_.get(), staged_name_);
  staged_name_.clear();
  return Status::ok();
}

Status write_all(int fd, const std::string& path, const void* data, size_t bytes,
                 int64_t offset_bytes) {
  const auto* from = static_cast<const std::byte*>(data);
  int attempts = 0;
  while (bytes > 0) {
    const int64_t count = syscalls().pwrite(fd, from, bytes, offset_bytes);
    if (count > 0) {
      from += count;
      bytes -= static_cast<size_t>(count);
      offset_bytes += count;
      attempts = 0;
      continue;
    }
    const int error = count == 0 ? EIO : static_cast<int>(-count);
    if ((error == EINTR || error == EAGAIN) && ++attempts < 300) {
      ::usleep(1000);
      continue;
    }
    return saved_failure(path, "must be written whole", error);
  }
  return Status::ok();
}

Status remove_saved(const std::string& target) {
  auto parts = split(target);
  if (!parts.is_ok()) return parts.status();
  auto parent = open_parent(parts.value().first);
  if (!parent.is_ok()) return parent.status();
  const std::string& name = parts.value().second;
  const int at = parent.value().get();
  auto lock = lock_alone(at, name, target, {});
  if (!lock.is_ok()) return lock.status();
  const std::string hidden = hidden_name(name);
  const int renamed = syscalls().rename(at, name.c_str(), hidden.c_str(), RENAME_NOREPLACE);
  if (renamed != 0) return saved_failure(target, "must be removable", -renamed);
  const int removed = remove_folder(at, hidden);
  if (removed == -ENOTEMPTY || removed == -EEXIST) {
    return saved_failure(
        target, "must hold nothing but a saved cache; the rest stands in " + hidden, -removed);
  }
  if (removed != 0) return saved_failure(target, "must be removable", -removed);
  (void)syscalls().fsync(at);
  return Status::ok();
}

Result<OwnedFd> open_saved_folder(const std::string& target) {
  auto parts = split(target);
  if (!parts.is_ok()) return parts.status();
  auto parent = open_parent(parts.value().first);
  if (!parent.is_ok()) return parent.status();
  const int fd = syscalls().open_at(parent.value().get(), parts.value().second.c_str(),
                                    O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
  if (fd >= 0) return OwnedFd(fd);
  if (failure_of(-fd) == Failure::kPassing) {
    return Status::storage(
        "open: '" + target + "' must be readable, got " + errno_text(-fd) + storage_hint(-fd), -fd,
        target);
  }
  return Status(StatusCode::kInvalid,
                "open: '" + target + "' must be the folder of a saved cache, got " +
                    errno_text(-fd) + "; KVSwapCache.save() makes one",
                -fd)
      .with_path(target);
}

Result<OwnedFd> open_saved_file(int folder, const std::string& target, const char* name) {
  const std::string file = "open: " + target + "/" + name;
  // Not to wait for the writer of a pipe of that name.
  const int fd =
      syscalls().open_at(folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0);
  if (fd == -ENOENT || fd == -ELOOP || fd == -ENXIO) {
    const std::string what = fd == -ENOENT  ? "must be there, and is not"
                             : fd == -ELOOP ? "must be a file, and is a link"
                                            : "must be a regular file, and is none";
    return Status::corrupt(file + " " + what + "; it is no whole saved cache: save it again",
                           target);
  }
  if (fd < 0) {
    return Status::storage(file + " must be readable, got " + errno_text(-fd) + storage_hint(-fd),
                           -fd, target);
  }
  OwnedFd opened(fd);
  struct stat facts{};
  const int known = syscalls().facts(fd, &facts);
  if (known != 0) {
    return Status::storage(
        file + " must be readable, got " + errno_text(-known) + storage_hint(-known), -known,
        target);
  }
  if (!S_ISREG(facts.st_mode)) {
    return Status::corrupt(file + " must be a regular file, and is none; save the cache again",
                           target);
  }
  return opened;
}

}  // namespace kvswap
