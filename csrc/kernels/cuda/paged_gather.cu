#include <cuda_runtime.h>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/moves.cuh"

namespace kvswap::cuda {
namespace {

template <typename Vector>
struct GatherJob {
  const void* const* pages = nullptr;
  Vector* keys = nullptr;
  Vector* values = nullptr;
  uint32_t pages_max = 0;
  uint32_t table_heads = 1;
  uint32_t page_heads = 1;
  uint32_t kv_heads = 1;
  uint32_t units = 0;  // batch * pages_max * kv_heads
  int side = 0;        // vectors of one head's K, and of its V
};

/// A warp copies one head of one page. KV heads are innermost: neighbours in the page.
template <typename Vector>
__global__ void __launch_bounds__(kMoveThreads) gather_pages(GatherJob<Vector> job) {
  const uint32_t unit = warp_unit();
  if (unit >= job.units) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t kv_head = unit % job.kv_heads;
  const uint32_t page = unit / job.kv_heads % job.pages_max;
  const uint32_t sequence = unit / job.kv_heads / job.pages_max;
  const uint32_t table = sequence * job.table_heads + (job.table_heads == 1 ? 0 : kv_head);
  const auto* base = static_cast<const Vector*>(job.pages[int64_t{table} * job.pages_max + page]);
  const int64_t at = (int64_t{sequence * job.kv_heads + kv_head} * job.pages_max + page) * job.side;
  if (base == nullptr) {
    for (int i = lane; i < job.side; i += 32) {
      job.keys[at + i] = Vector{};
      job.values[at + i] = Vector{};
    }
    return;
  }
  const Vector* source = base + int64_t{job.page_heads == 1 ? 0 : kv_head} * 2 * job.side;
  copy_run(job.keys + at, source, job.side, lane);
  copy_run(job.values + at, source + job.side, job.side, lane);
}

template <typename Vector>
Status gather(const PagedGatherArgs& args, int64_t side_bytes, void* stream) {
  GatherJob<Vector> job;
  job.pages = args.pages;
  job.keys = static_cast<Vector*>(args.keys);
  job.values = static_cast<Vector*>(args.values);
  job.pages_max = static_cast<uint32_t>(args.pages_max);
  job.table_heads = static_cast<uint32_t>(args.table_heads);
  job.page_heads = static_cast<uint32_t>(args.shape.kv_heads);
  job.kv_heads = static_cast<uint32_t>(args.kv_heads());
  const int64_t units = args.batch * args.pages_max * args.kv_heads();
  KVSWAP_RETURN_IF_ERROR(check_units("paged_gather", units));
  job.units = static_cast<uint32_t>(units);
  job.side = static_cast<int>(side_bytes / static_cast<int64_t>(sizeof(Vector)));
  return launch("paged_gather", stream, {.x = ceil_div(units, kMoveThreads / 32)}, kMoveThreads,
                gather_pages<Vector>, job);
}

}  // namespace

Status paged_gather(const PagedGatherArgs& args, void* stream) {
  const int64_t side_bytes =
      args.shape.group_tokens * args.shape.head_dim * args.shape.element_bytes;
  if (side_bytes == 0) return Status::ok();
  return move_bytes(side_bytes) == 16 ? gather<uint4>(args, side_bytes, stream)
                                      : gather<uint16_t>(args, side_bytes, stream);
}

}  // namespace kvswap::cuda
