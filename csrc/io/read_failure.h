#pragma once

#include "io/data_file.h"
#include "io/read_progress.h"

namespace kvswap {

/// Why a read failed, by the folder whose file it was from: that of a saved cache that a session
/// goes on from is another disk's, perhaps.
Status read_failure(const ReadProgress& read, const DataFile& file);

}  // namespace kvswap
