#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/status.h"

namespace kvswap {

/// What this machine offers to the readers.
struct HostInfo {
  bool has_uring = false;
  std::string uring_problem;  // why not, in a sentence; empty when it works
  std::string kernel_release;
  int64_t page_bytes = 0;
  int64_t locked_memory_bytes = 0;  // RLIMIT_MEMLOCK; -1: no limit
};

HostInfo read_host_info();

/// What a session's file in a directory would be like.
struct DirectoryInfo {
  bool takes_direct = false;
  int64_t alignment_bytes = 0;
  int64_t free_bytes = 0;
  std::vector<std::string> fallbacks;  // sentences; empty when nothing is missing
};

/// Opens a session's file there, looks, and closes it again.
Result<DirectoryInfo> probe_directory(const std::string& directory);

}  // namespace kvswap
