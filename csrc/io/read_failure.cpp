#include "io/read_failure.h"

#include "io/layered_file.h"

namespace kvswap {

Status read_failure(const ReadProgress& read, const DataFile& file) {
  const auto* stack = dynamic_cast<const LayeredFile*>(&file);
  return read.failure(stack == nullptr ? file.directory()
                                       : stack->directory_of(read.offset_bytes()));
}

}  // namespace kvswap
