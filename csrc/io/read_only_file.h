#pragma once

#include <memory>
#include <string>

#include "io/anonymous_file.h"
#include "io/data_file.h"

namespace kvswap {

struct ReadOnlyOptions {
  std::string directory;  // named in messages
  bool wants_direct = false;
  int64_t unit_bytes = 0;  // every read begins at a multiple of it and is as long: for O_DIRECT
};

/// A file that is only read: with O_DIRECT where that is wanted and its alignment divides the unit,
/// else through the page cache, as `is_direct()` says. Writing to it is our mistake.
///
/// Thread rules: any thread.
std::unique_ptr<DataFile> make_read_only_file(OwnedFd fd, const ReadOnlyOptions& options);

/// What O_DIRECT asks of an open file; 0 where the file system says that it has none.
int64_t direct_alignment(int fd);

}  // namespace kvswap
