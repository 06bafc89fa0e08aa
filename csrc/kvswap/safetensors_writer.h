#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "io/saved_tensor.h"

namespace kvswap {

/// Writes a safetensors file, tensor by tensor in pieces of at most 1 MiB, where a row is not
/// longer. `path` is named in errors. Returns the file's size.
Result<int64_t> write_safetensors(int fd, const std::string& path,
                                  std::span<const SavedTensor> tensors,
                                  const std::map<std::string, std::string>& metadata);

}  // namespace kvswap
