#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/score.cuh"

namespace kvswap::cuda {

inline constexpr int kScoreThreads = 256;
inline constexpr int kScoreWarps = kScoreThreads / 32;
inline constexpr int kRankMax = static_cast<int>(kSummaryRankMax);
inline constexpr int kQueryTile = 4;  // queries that share one reading of the summary

/// Copies `count` queries of one sequence to shared memory; missing ones become zeros.
template <int kQueries>
__device__ inline void stage_queries(const float* query, int64_t count, int rank, float* staged) {
  for (int i = static_cast<int>(threadIdx.x); i < kQueries * rank; i += kScoreThreads) {
    staged[i] = i < count * rank ? query[i] : 0.0f;
  }
}

/// Block `block` of a sequence's summary.
template <typename T>
__device__ inline BlockSource<T> find_block(const SummaryTable& table, int64_t sequence,
                                            int64_t block) {
  const auto blocks = static_cast<uint32_t>(table.chunk_tokens / kBlockRows);
  const int64_t chunk = sequence * table.chunks_max + static_cast<uint32_t>(block) / blocks;
  return {.chunk = static_cast<const T*>(table.chunks[chunk]),
          .chunk_scales = table.scales ? table.scales[chunk] : nullptr,
          .in_chunk = static_cast<int>(static_cast<uint32_t>(block) % blocks)};
}

inline Status check_summary(const char* where, const SummaryTable& table) {
  KVSWAP_RETURN_IF_ERROR(check_range(where, "rank", table.rank, 0, kRankMax));
  if (table.chunk_tokens % kSummaryBlock != 0 || table.chunk_tokens <= 0) {
    return Status::invalid(std::string(where) + ": chunk_tokens must be a multiple of 16, got " +
                           std::to_string(table.chunk_tokens));
  }
  if (table.dtype == DType::kInt4) {
    return Status::invalid(std::string(where) +
                           ": summaries must not be int4, which have no kernels");
  }
  if ((table.dtype == DType::kInt8) != (table.scales != nullptr)) {
    return Status::invalid(std::string(where) +
                           ": scales must be given with an int8 summary and only then");
  }
  return Status::ok();
}

}  // namespace kvswap::cuda
