#include "io/file_system.h"

#include <sys/vfs.h>

namespace kvswap {

bool keeps_in_memory(uint32_t type) {
  constexpr uint32_t kTmpfs = 0x01021994;
  constexpr uint32_t kRamfs = 0x858458f6;
  return type == kTmpfs || type == kRamfs;
}

bool lies_in_memory(int fd) {
  struct statfs system{};
  return ::fstatfs(fd, &system) == 0 && keeps_in_memory(static_cast<uint32_t>(system.f_type));
}

}  // namespace kvswap
