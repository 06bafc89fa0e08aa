#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/top_k_block.cuh"

namespace kvswap::cuda {
namespace {

/// One level: from scores or from the lists of the level before, to lists or to the result.
struct LevelJob {
  const float* scores = nullptr;  // of the first level
  const int32_t* row_counts = nullptr;
  const int32_t* wanted = nullptr;  // of each row; null: k
  int64_t row_stride = 0;
  TopKLists from = {};
  int64_t count = 0;  // of a row of the input, the lists' capacity all counted
  int64_t chunks = 0;
  TopKLists to = {};
  int32_t* indices = nullptr;  // of the last level
  int32_t* chosen = nullptr;
  int k = 0;
  int64_t result_stride = 0;
};

enum class Input { kScores, kLists };

template <Input kInput>
__device__ uint32_t load_key(const LevelJob& job, int64_t row, int64_t count, int64_t place) {
  if (place >= count) return 0;
  if constexpr (kInput == Input::kScores) {
    return ordered_score(__float_as_uint(job.scores[row * job.row_stride + place]));
  } else {
    const auto capacity = static_cast<uint32_t>(job.from.capacity);
    const int64_t list = row * job.from.lists + static_cast<uint32_t>(place) / capacity;
    const int64_t in_list = static_cast<uint32_t>(place) % capacity;
    if (in_list >= job.from.counts[list]) return 0;
    return job.from.keys[row * job.count + place];
  }
}

/// The keys from place `first` on, of one thread.
template <Input kInput>
__device__ void load_keys(const LevelJob& job, int64_t row, int64_t count, int64_t first,
                          uint32_t (&keys)[kItems]) {
  if constexpr (kInput == Input::kScores) {
    const float* source = job.scores + row * job.row_stride + first;
    const bool is_aligned = (reinterpret_cast<uintptr_t>(source) & (kVectorBytes - 1)) == 0;
    if (is_aligned && first + kItems <= count) {
      uint4 vectors[kItems / 4];
#pragma unroll
      for (int i = 0; i < kItems / 4; ++i) vectors[i] = load_vector(source + 4 * i);
#pragma unroll
      for (int i = 0; i < kItems / 4; ++i) {
        keys[4 * i] = ordered_score(vectors[i].x);
        keys[4 * i + 1] = ordered_score(vectors[i].y);
        keys[4 * i + 2] = ordered_score(vectors[i].z);
        keys[4 * i + 3] = ordered_score(vectors[i].w);
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) keys[i] = load_key<kInput>(job, row, count, first + i);
}

/// Grid: (rows * chunks).
template <Input kInput, int kThreads>
__global__ void __launch_bounds__(kThreads) choose_level(LevelJob job) {
  __shared__ TopKShared<kThreads> shared;
  const int64_t row = blockIdx.x / static_cast<uint32_t>(job.chunks);
  const int64_t chunk = blockIdx.x % static_cast<uint32_t>(job.chunks);
  const int64_t first = chunk * kThreads * kItems + static_cast<int64_t>(threadIdx.x) * kItems;
  int64_t count = job.count;
  if (kInput == Input::kScores && job.row_counts != nullptr && job.row_counts[row] < count) {
    count = job.row_counts[row];
  }
  uint32_t keys[kItems];
  load_keys<kInput>(job, row, count, first, keys);

  const bool wants_fewer = job.wanted != nullptr && job.wanted[row] < job.k;
  const int k = wants_fewer ? job.wanted[row] : job.k;
  const Threshold threshold = find_threshold(keys, k, shared);
  const int64_t list = row * job.chunks + chunk;
  const int chosen = choose_keys(keys, threshold, shared, [&](int place, int item) {
    const int64_t at = first + item;
    const int32_t id =
        kInput == Input::kScores ? static_cast<int32_t>(at) : job.from.ids[row * job.count + at];
    if (job.chosen != nullptr) {
      job.indices[row * job.result_stride + place] = id;
    } else {
      job.to.keys[list * job.to.capacity + place] = keys[item];
      job.to.ids[list * job.to.capacity + place] = id;
    }
  });
  if (threadIdx.x == 0) (job.chosen != nullptr ? job.chosen[row] : job.to.counts[list]) = chosen;
  if (job.chosen == nullptr) return;
  for (int64_t i = chosen + threadIdx.x; i < job.result_stride; i += kThreads) {
    job.indices[row * job.result_stride + i] = -1;
  }
}

template <Input kInput>
Status run_level(const LevelJob& job, int64_t chunk, int64_t rows, void* stream) {
  const bool is_small = chunk == kSmallChunk;
  return launch(
      "top_k", stream, {.x = rows * job.chunks}, is_small ? kSmallTopKThreads : kLargeTopKThreads,
      is_small ? choose_level<kInput, kSmallTopKThreads> : choose_level<kInput, kLargeTopKThreads>,
      job);
}

/// Of keys, ids and counts; whole sixteens of bytes.
int64_t words_bytes(int64_t words) { return round_up(words * int64_t{sizeof(int32_t)}, 16); }

int64_t lists_bytes(const TopKLevels& levels, int64_t rows, int64_t count) {
  const int64_t lists = rows * levels.chunks(count);
  return words_bytes(lists * (2 * levels.list_capacity(count) + 1));
}

/// Lists in a piece of scratch, which moves on behind them.
TopKLists take_lists(const TopKLevels& levels, char*& scratch, int64_t rows, int64_t count) {
  TopKLists lists;
  lists.lists = levels.chunks(count);
  lists.capacity = levels.list_capacity(count);
  lists.keys = reinterpret_cast<uint32_t*>(scratch);
  lists.ids = reinterpret_cast<int32_t*>(lists.keys + rows * lists.lists * lists.capacity);
  lists.counts = lists.ids + rows * lists.lists * lists.capacity;
  scratch += lists_bytes(levels, rows, count);
  return lists;
}

int64_t kept_of(int64_t count, int64_t k) { return k < count ? k : count; }

}  // namespace

int64_t top_k_scratch_bytes(int64_t rows, int64_t count, int64_t k) {
  if (count <= kLargeChunk) return 0;
  // Levels of large chunks, and one of small ones after any of them: no less than smaller counts
  // and smaller k take.
  k = std::min(kept_of(count, k), kTopKMax);
  const int64_t small = ceil_div(count, kSmallChunk);
  int64_t bytes = words_bytes(rows * (2 * std::min(small * k, kLargeChunk) + small));
  while (count > kLargeChunk) {
    const int64_t large = ceil_div(count, kLargeChunk);
    bytes += words_bytes(rows * large * (2 * k + 1));
    count = large * k;
  }
  return bytes;
}

Status top_k(const BatchTopKArgs& args, void* stream) {
  const int64_t kept = kept_of(args.count, args.k);
  KVSWAP_RETURN_IF_ERROR(check_range("top_k", "count", args.count, 0, 2147483647));
  KVSWAP_RETURN_IF_ERROR(check_range("top_k", "k", args.k, 0, 2147483647));
  if (args.count > kLargeChunk) {
    KVSWAP_RETURN_IF_ERROR(
        check_range("top_k", "k (of more than 16384 scores)", kept, 0, kTopKMax));
  }
  LevelJob job;
  job.scores = args.scores;
  job.row_counts = args.counts;
  job.wanted = args.wanted;
  job.row_stride = args.row_stride;
  job.count = args.count;
  job.k = static_cast<int>(kept);
  job.result_stride = args.k;
  const TopKLevels levels(kept);
  char* scratch = static_cast<char*>(args.scratch);
  for (bool is_first = true;; is_first = false) {
    job.chunks = levels.chunks(job.count);
    const int64_t chunk = levels.chunk_scores(job.count);
    const bool is_last = job.chunks == 1;
    if (is_last) {
      job.indices = args.indices;
      job.chosen = args.chosen;
    } else {
      job.to = take_lists(levels, scratch, args.rows, job.count);
    }
    KVSWAP_RETURN_IF_ERROR(is_first ? run_level<Input::kScores>(job, chunk, args.rows, stream)
                                    : run_level<Input::kLists>(job, chunk, args.rows, stream));
    if (is_last) return Status::ok();
    job.from = job.to;
    job.count = levels.next_count(job.count);
  }
}

}  // namespace kvswap::cuda
