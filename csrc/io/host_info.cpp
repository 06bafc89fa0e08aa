#include "io/host_info.h"

#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <memory>

#include "io/data_file.h"
#include "io/reader_backends.h"

namespace kvswap {

HostInfo read_host_info() {
  HostInfo info;
  const Status uring = check_uring();
  info.has_uring = uring.is_ok();
  info.uring_problem = uring.message();
  utsname names{};
  if (::uname(&names) == 0) info.kernel_release = names.release;
  info.page_bytes = ::sysconf(_SC_PAGESIZE);
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
    info.locked_memory_bytes =
        limit.rlim_cur == RLIM_INFINITY ? -1 : static_cast<int64_t>(limit.rlim_cur);
  }
  return info;
}

Result<DirectoryInfo> probe_directory(const std::string& directory) {
  const Result<std::unique_ptr<DataFile>> file = DataFile::open({.directory = directory});
  if (!file.is_ok()) return file.status();
  const Result<int64_t> free = free_bytes(directory);
  if (!free.is_ok()) return free.status();
  return DirectoryInfo{.takes_direct = file.value()->is_direct(),
                       .alignment_bytes = file.value()->alignment_bytes(),
                       .free_bytes = free.value(),
                       .fallbacks = file.value()->fallbacks()};
}

}  // namespace kvswap
