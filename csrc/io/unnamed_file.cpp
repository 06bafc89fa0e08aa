#include "io/unnamed_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "io/error_text.h"

namespace kvswap {
namespace {

Status creation_error(const std::string& directory, int error_number) {
  if (error_number == ENOSPC || error_number == EDQUOT) {
    return Status::storage("DataFile::open: the file system of '" + directory +
                               "' must have room for a session file, got " +
                               errno_text(error_number) + "; free space or choose another path",
                           error_number);
  }
  if (error_number == EACCES || error_number == EPERM || error_number == EROFS) {
    return {StatusCode::kInvalid,
            "DataFile::open: directory must be writable, got '" + directory + "' where " +
                errno_text(error_number) + "; change its permissions or choose another path",
            error_number};
  }
  return Status::storage("DataFile::open: directory must take a new file, got '" + directory +
                             "' where " + errno_text(error_number) + "; choose another path",
                         error_number);
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
  const int fd = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return creation_error(directory, errno);
  return OwnedFd(fd);
}

Result<OwnedFd> create_and_unlink_file(const std::string& directory) {
  std::string path = directory + "/.kvswap-XXXXXX";
  const int fd = ::mkostemp(path.data(), O_CLOEXEC);  // creates with 0600
  if (fd < 0) return creation_error(directory, errno);
  OwnedFd file(fd);
  if (::unlink(path.c_str()) != 0) {
    return Status::storage("DataFile::open: session file '" + path +
                               "' must be removable at once, got " + errno_text(errno) +
                               "; remove it by hand and choose another path",
                           errno);
  }
  return file;
}

}  // namespace kvswap
