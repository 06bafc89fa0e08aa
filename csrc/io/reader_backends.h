#pragma once

#include <cstdint>
#include <memory>

#include "io/block_reader.h"
#include "io/data_file.h"
#include "io/readers.h"

namespace kvswap {

/// The readers behind open_reader(); `options` is checked there.
std::unique_ptr<BlockReader> make_sync_reader(const DataFile& file, const ReaderOptions& options);
Result<std::unique_ptr<BlockReader>> make_thread_reader(const DataFile& file,
                                                        const ReaderOptions& options);
Result<std::unique_ptr<BlockReader>> make_uring_reader(const DataFile& file,
                                                       const ReaderOptions& options);

/// Of a file that is memory.
std::unique_ptr<BlockReader> make_memory_reader(const DataFile& file);

/// Whether a ring can be set up here, or why not.
Status check_uring();

}  // namespace kvswap
