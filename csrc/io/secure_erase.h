#pragma once

#include <cstdint>
#include <string>

namespace kvswap {

/// Writes zeros over a part of a file, in its place. Returns 0, or errno of what kept it from that.
/// Offset and length are multiples of what O_DIRECT asks.
int write_zeros(int fd, int64_t offset_bytes, int64_t length_bytes);

/// The same, and waits until the disk has them: what is in the page cache is dropped with the file.
int overwrite_with_zeros(int fd, int64_t offset_bytes, int64_t length_bytes);

/// The first `bytes` of a file that ends now; a line in the log names `file` where that fails.
void wipe_at_end(int fd, int64_t bytes, const std::string& file);

}  // namespace kvswap
