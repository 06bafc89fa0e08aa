#pragma once

#include <cstdint>

#include "kernels/paged_attention.h"

namespace kvswap::cuda {

inline constexpr int kAttentionThreads = 128;
inline constexpr int kAttentionWarps = kAttentionThreads / 32;
inline constexpr int kTensorRows = 16;   // query rows of a block: fp16 and bf16, tensor cores
inline constexpr int kScalarRows = 4;    // fp32
inline constexpr int kStageSlots = 256;  // token slots looked up at once
inline constexpr int64_t kSplitsMax = 128;
inline constexpr int64_t kSplitSlotsMin = 64;   // 16 for each warp
inline constexpr int64_t kBlocksEnough = 1024;  // about two waves on the largest devices

/// How the work is cut into blocks: (split of the page table, KV head and tile of query rows,
/// sequence). It depends on sizes alone, so the same call gives the same bits on any device.
struct AttentionPlan {
  explicit AttentionPlan(const PagedAttentionArgs& args)
      : kv_heads(args.kv_heads()),
        ratio(args.heads / (kv_heads > 0 ? kv_heads : 1)),
        tile_rows(args.dtype == DType::kFloat32 ? kScalarRows : kTensorRows),
        row_tiles((ratio * args.queries + tile_rows - 1) / tile_rows),
        slots(args.pages_max * args.shape.group_tokens) {
    const int64_t units = args.batch * kv_heads * row_tiles;
    if (units > 0) splits = (kBlocksEnough + units - 1) / units;
    const int64_t worth = (slots + kSplitSlotsMin - 1) / kSplitSlotsMin;
    if (splits > worth) splits = worth;
    if (splits > kSplitsMax) splits = kSplitsMax;
    if (splits < 1) splits = 1;
    const int64_t even = (slots + splits - 1) / splits;
    split_slots = (even + kSplitSlotsMin - 1) / kSplitSlotsMin * kSplitSlotsMin;
    splits = split_slots > 0 ? (slots + split_slots - 1) / split_slots : 1;
  }

  int64_t kv_heads;
  int64_t ratio;      // query heads of a KV head
  int64_t tile_rows;  // rows are (head of the group, query), queries innermost
  int64_t row_tiles;
  int64_t slots;
  int64_t splits = 1;
  int64_t split_slots = 0;

  /// Rows of all partial results: ((sequence, KV head, tile), split, row of the tile).
  int64_t partial_rows(const PagedAttentionArgs& args) const {
    return splits == 1 ? 0 : args.batch * kv_heads * row_tiles * splits * tile_rows;
  }
};

}  // namespace kvswap::cuda
