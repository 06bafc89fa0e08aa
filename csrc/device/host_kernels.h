#pragma once

#include "kernels/cuda/kernels.h"

namespace kvswap::host_kernels {

/// The CPU's answers to the batched contracts, one after the other.
void project_keys(const cuda::BatchProjectKeysArgs& args);
void project_query(const cuda::BatchProjectQueryArgs& args);
void summarize_groups(const cuda::BatchSummarizeArgs& args);
void ask_groups(const cuda::BatchAskArgs& args);
/// Scratch: [queries, groups] floats.
void select_groups(const cuda::BatchSelectArgs& args);
int64_t select_groups_scratch_bytes(const cuda::BatchSelectArgs& args);
void pack_records(const cuda::BatchTransferArgs& args);
void copy_records(const cuda::CopyRecordsArgs& args);

}  // namespace kvswap::host_kernels
