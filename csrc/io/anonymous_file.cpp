#include "io/anonymous_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string_view>

#include "io/error_text.h"
#include "io/syscalls.h"

namespace kvswap {
namespace {

constexpr std::string_view kNamePrefix = ".kvswap-";
constexpr size_t kNameLength = kNamePrefix.size() + 6;  // as mkostemp() makes it

Status creation_error(const std::string& directory, int error_number) {
  if (error_number == ENOSPC || error_number == EDQUOT) {
    return Status::storage("session file: the file system of '" + directory +
                               "' must have room for a session file, got " +
                               errno_text(error_number) + "; free space or choose another path",
                           error_number, directory);
  }
  if (error_number == EACCES || error_number == EPERM || error_number == EROFS) {
    return Status(StatusCode::kInvalid,
                  "session file: directory must be writable, got '" + directory + "': " +
                      errno_text(error_number) + "; change its permissions or choose another path",
                  error_number)
        .with_path(directory);
  }
  return Status::storage("session file: directory must take a new file, got '" + directory +
                             "': " + errno_text(error_number) + storage_hint(error_number) +
                             "; choose another path",
                         error_number, directory);
}

/// A file that its creator still holds is locked; so is one of another user, which cannot be
/// opened.
void remove_if_left(int folder, const char* name) {
  const OwnedFd file(::openat(folder, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (file.get() < 0 || ::flock(file.get(), LOCK_EX | LOCK_NB) != 0) return;
  (void)::unlinkat(folder, name, 0);
}

void remove_left_files(const std::string& directory) {
  DIR* folder = ::opendir(directory.c_str());
  if (folder == nullptr) return;
  while (const dirent* entry = ::readdir(folder)) {
    const std::string_view name = entry->d_name;
    if (name.size() == kNameLength && name.starts_with(kNamePrefix)) {
      remove_if_left(::dirfd(folder), entry->d_name);
    }
  }
  ::closedir(folder);
}

}  // namespace

OwnedFd::~OwnedFd() {
  if (fd_ >= 0) ::close(fd_);
}

OwnedFd& OwnedFd::operator=(OwnedFd&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Result<OwnedFd> create_unnamed_file(const std::string& directory) {
  // Without O_EXCL: name_file() may give it a name later.
  const int fd = syscalls().open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return creation_error(directory, -fd);
  return OwnedFd(fd);
}

Result<OwnedFd> create_and_unlink_file(const std::string& directory) {
  remove_left_files(directory);
  std::string path = directory + "/" + std::string(kNamePrefix) + "XXXXXX";
  const int fd = ::mkostemp(path.data(), O_CLOEXEC);  // creates with 0600
  if (fd < 0) return creation_error(directory, errno);
  OwnedFd file(fd);
  (void)::flock(fd, LOCK_EX | LOCK_NB);
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return Status::storage("session file '" + path + "' must be removable at once, got " +
                               errno_text(errno) + "; remove it by hand and choose another path",
                           errno, path);
  }
  return file;
}

}  // namespace kvswap
