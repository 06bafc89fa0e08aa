#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvswap/prefill_attention.h"

namespace kvswap {

/// What a part attends of a chunk, in memory of the host.
struct PartView {
  QueryView query;               // of the part alone: sequence 0
  KeyValueView own;              // likewise
  int64_t position = 0;          // of the first token
  const float* sinks = nullptr;  // [heads]
  std::byte* output = nullptr;   // [tokens, ...] of the cache's dtype
  int64_t output_stride = 0;     // elements from token to token
};

/// A part in memory of the host, by chunk_attention(), in fp32 until it is written.
std::unique_ptr<ExactPart> host_part(const Engine& engine, int64_t part, const PartView& view,
                                     const AttendArgs& args);

/// ExactChunk::attend_alone() for one part, a few hundred queries at a time.
void attend_part_alone(const Engine& engine, int64_t part, const PartView& view,
                       const AttendArgs& args);

}  // namespace kvswap
