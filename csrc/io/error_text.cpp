#include "io/error_text.h"

#include <cerrno>
#include <system_error>

namespace kvswap {

std::string errno_text(int error_number) {
  return std::generic_category().message(error_number) + " (errno " + std::to_string(error_number) +
         ")";
}

std::string storage_hint(int error_number) {
  switch (error_number) {
    case EIO:
      return "; the disk may be failing: see the kernel log";
    case ENODEV:
    case ENXIO:
      return "; the disk is gone: was it unplugged or unmounted?";
    case EFBIG:
      return "; raise the file size limit (ulimit -f) or use another file system";
    case EDQUOT:
      return "; the user's disk quota is used up: free space or choose another path";
    case EROFS:
      return "; the file system has become read-only: see the kernel log";
    case EMFILE:
    case ENFILE:
      return "; raise the limit on open files (ulimit -n)";
    case EAGAIN:
      return "; the system was short of something for a second: try again";
    case EINVAL:
      return "; the file system may refuse this alignment under O_DIRECT: try buffered I/O";
    default:
      return "";
  }
}

}  // namespace kvswap
