// How far the kernels are from the machine's limits. One thread, by hand, on a quiet machine:
//   g++ -std=c++20 -O3 -Icsrc -DKVSWAP_HAS_HIGHWAY=1 bench/kernels_bench.cpp
//       csrc/kernels/cpu/*.cpp -o build/kernels_bench && build/kernels_bench [part of a name]
// Prints the median of repeated runs in the thread's own CPU time.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention_mass.h"
#include "kernels/chunk_attention.h"
#include "kernels/cpu_features.h"
#include "kernels/fp8.h"
#include "kernels/group_topk.h"
#include "kernels/low_rank_score.h"
#include "kernels/paged_attention.h"
#include "kernels/project.h"
#include "kernels/records.h"
#include "kernels/select_groups.h"

using namespace kvswap;

namespace {

std::string wanted;  // part of a name; empty: all

double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

/// `amount` of `unit` (GB, GFLOP, ...) is what one call of `work` gets through.
void measure(const std::string& name, double amount, const char* unit,
             const std::function<void()>& work) {
  if (name.find(wanted) == std::string::npos) return;
  work();
  std::vector<double> seconds;
  const double begin = thread_seconds();
  while (seconds.size() < 5 || (thread_seconds() - begin < 0.6 && seconds.size() < 2000)) {
    const double start = thread_seconds();
    work();
    seconds.push_back(thread_seconds() - start);
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  std::printf("%-44s %9.1f us %8.1f %s/s (best %.1f)\n", name.c_str(), median * 1e6,
              amount / median, unit, amount / seconds[0]);
}

template <typename T>
std::vector<T> random_words(int64_t count) {
  std::vector<T> words(count);
  uint32_t state = 12345;
  for (T& word : words) {
    state = state * 1664525 + 1013904223;
    if constexpr (std::is_same_v<T, float>) {
      word = static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
    } else {
      word = static_cast<T>(0x3c00 | (state >> 16 & 0x81ff));  // a bf16 or half around 1
    }
  }
  return words;
}

void measure_memory() {
  for (const int64_t mib : {2, 16, 256}) {
    std::vector<char> from(mib << 20, 1), to(mib << 20, 2);
    measure("memcpy " + std::to_string(mib) + " MiB, read + write", 2e-9 * from.size(), "GB",
            [&] { std::memcpy(to.data(), from.data(), from.size()); });
  }
}

void measure_score(int64_t tokens, int64_t rank, DType dtype, int64_t queries, int64_t layers) {
  const int64_t blocks = tokens / kSummaryBlock;
  const int64_t layer_bytes = blocks * rank * kSummaryBlock * dtype_bytes(dtype);
  const auto summary = random_words<uint16_t>(layers * layer_bytes / 2);
  const auto query = random_words<float>(queries * rank);
  const std::vector<float> scale(tokens, 1.0f);
  std::vector<float> scores(queries * tokens);
  const char* names[] = {"fp32", "bf16", "fp16", "int8"};
  int64_t layer = 0;
  measure("low_rank_score " + std::to_string(tokens) + " rank " + std::to_string(rank) + " " +
              names[static_cast<int>(dtype)] + " queries " + std::to_string(queries),
          1e-9 * layer_bytes, "GB", [&] {
            layer = (layer + 1) % layers;
            low_rank_score(
                {.summary = reinterpret_cast<const char*>(summary.data()) + layer * layer_bytes,
                 .token_scale = dtype == DType::kInt8 ? scale.data() : nullptr,
                 .query = query.data(),
                 .scores = scores.data(),
                 .score_stride = tokens,
                 .blocks = blocks,
                 .rank = rank,
                 .queries = queries,
                 .dtype = dtype});
          });
}

void measure_select() {
  const int64_t tokens = 32768, rank = 32, layers = 32;
  const auto summary = random_words<uint16_t>(layers * tokens * rank);
  const auto query = random_words<float>(rank);
  std::vector<float> group_scores(tokens / 4);
  std::vector<int32_t> indices(100);
  int64_t layer = 0;
  measure("select_groups 32768 rank 32 bf16", 2e-9 * tokens * rank, "GB", [&] {
    layer = (layer + 1) % layers;
    select_groups({.summary = summary.data() + layer * tokens * rank,
                   .query = query.data(),
                   .group_scores = group_scores.data(),
                   .indices = indices.data(),
                   .last_token = tokens,
                   .rank = rank,
                   .group_tokens = 4,
                   .k = 100,
                   .dtype = DType::kBFloat16},
                  {});
  });
}

void measure_top_k() {
  for (const int64_t count : {8192, 262144}) {
    const auto scores = random_words<float>(count);
    std::vector<float> maxima(count / 4);
    measure("group_max of 4, " + std::to_string(count), 1e-9 * count, "Gscores", [&] {
      group_max({.scores = scores.data(),
                 .group_scores = maxima.data(),
                 .tokens = count,
                 .group_tokens = 4});
    });
    for (const int64_t k : {100, 4096}) {
      std::vector<int32_t> indices(k);
      measure("top_k " + std::to_string(k) + " of " + std::to_string(count), 1e-9 * count,
              "Gscores", [&] {
                top_k({.scores = scores.data(), .indices = indices.data(), .count = count, .k = k});
              });
    }
  }
}

void measure_project(int64_t rank) {
  const int64_t tokens = 4096, kv_heads = 8, head_dim = 64;
  const auto keys = random_words<uint16_t>(tokens * kv_heads * head_dim);
  const auto projection = random_words<float>(kv_heads * head_dim * rank);
  std::vector<uint16_t> summary(tokens * rank);
  measure("project_keys 512 dims, rank " + std::to_string(rank),
          2e-9 * tokens * kv_heads * head_dim * rank, "GFLOP", [&] {
            project_keys({.keys = keys.data(),
                          .head_stride = tokens * head_dim,
                          .token_stride = head_dim,
                          .projection = projection.data(),
                          .summary = summary.data(),
                          .tokens = tokens,
                          .kv_heads = kv_heads,
                          .head_dim = head_dim,
                          .rank = rank,
                          .key_dtype = DType::kBFloat16,
                          .summary_dtype = DType::kBFloat16});
          });
}

void measure_project_query() {
  const int64_t rank = 32, layers = 64;
  const auto query = random_words<uint16_t>(32 * 64);
  const auto projection = random_words<float>(layers * 512 * rank);
  std::vector<float> projected(rank);
  int64_t layer = 0;
  measure("project_query 32 heads x 64, rank 32", 4e-9 * 512 * rank, "GB", [&] {
    layer = (layer + 1) % layers;
    project_query({.query = query.data(),
                   .head_stride = 64,
                   .projection = projection.data() + layer * 512 * rank,
                   .projected = projected.data(),
                   .heads = 32,
                   .kv_heads = 8,
                   .head_dim = 64,
                   .rank = rank,
                   .dtype = DType::kBFloat16});
  });
}

void measure_records() {
  const int64_t tokens = 16384, kv_heads = 8, head_dim = 64, group = 4;
  const RecordShape shape{kv_heads, group, head_dim, 2};
  auto keys = random_words<uint16_t>(tokens * kv_heads * head_dim);
  auto values = random_words<uint16_t>(tokens * kv_heads * head_dim);
  std::vector<char> arena(tokens / group * shape.payload_bytes());
  std::vector<void*> records;
  std::vector<int64_t> first_tokens;
  for (int64_t i = 0; i < tokens / group; ++i) {
    records.push_back(arena.data() + i * shape.payload_bytes());
    first_tokens.push_back(i * group);
  }
  for (const bool hnd : {true, false}) {
    const int64_t head_stride = hnd ? tokens * head_dim : head_dim;
    const int64_t token_stride = hnd ? head_dim : kv_heads * head_dim;
    const TransferArgs args{.shape = shape,
                            .tokens = {keys.data(), values.data(), head_stride, token_stride,
                                       head_stride, token_stride},
                            .records = records.data(),
                            .first_tokens = first_tokens.data(),
                            .slots = nullptr,
                            .lengths = nullptr,
                            .count = tokens / group};
    const double gigabytes = 2e-9 * arena.size();
    const std::string name = hnd ? "HND" : "NHD";
    measure("pack_records " + name + ", read + write", gigabytes, "GB",
            [&] { pack_records(args); });
    measure("unpack_records " + name + ", read + write", gigabytes, "GB",
            [&] { unpack_records(args); });
  }
}

/// A page pool as the runtime has it: in huge pages where the system gives them.
struct HugePool {
  explicit HugePool(int64_t elements) {
    constexpr size_t kHugePage = 2 << 20;
    const size_t bytes = (elements * 2 + kHugePage - 1) / kHugePage * kHugePage;
    words = static_cast<uint16_t*>(std::aligned_alloc(kHugePage, bytes));
    madvise(words, bytes, MADV_HUGEPAGE);
    const auto values = random_words<uint16_t>(1 << 20);
    for (int64_t i = 0; i < elements; ++i) words[i] = values[i % values.size()];
  }
  ~HugePool() { std::free(words); }
  const uint16_t* data() const { return words; }

  uint16_t* words;
};

/// Pages in random slots of a pool that is larger than the caches.
void measure_attention(int64_t batch, int64_t heads, int64_t kv_heads, int64_t head_dim,
                       int64_t group, int64_t queries, bool in_cache) {
  constexpr int64_t kPoolBytes = 160 << 20;
  const RecordShape shape{kv_heads, group, head_dim, 2};
  const int64_t pages = 436 / group;
  const int64_t page_elements = shape.payload_bytes() / 2;
  const int64_t step_bytes = batch * pages * shape.payload_bytes();
  const int64_t layers = in_cache ? 1 : std::max<int64_t>(1, kPoolBytes / step_bytes);
  const int64_t slots = layers * batch * pages;
  const HugePool pool(slots * page_elements);
  std::vector<int64_t> order(slots);
  for (int64_t i = 0; i < slots; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(3));
  std::vector<const void*> table;
  for (const int64_t slot : order) table.push_back(pool.data() + slot * page_elements);
  std::vector<uint64_t> masks(batch * pages, ~uint64_t{0});
  std::vector<int32_t> positions(batch * pages, 0), counts(batch, pages),
      query_positions(batch, 1000);
  const auto query = random_words<uint16_t>(batch * heads * queries * head_dim);
  std::vector<uint16_t> output(query.size());
  PagedAttentionArgs args;
  args.query = query.data();
  args.query_batch_stride = heads * queries * head_dim;
  args.query_head_stride = queries * head_dim;
  args.query_token_stride = head_dim;
  args.output = output.data();
  args.masks = masks.data();
  args.positions = positions.data();
  args.page_counts = counts.data();
  args.query_positions = query_positions.data();
  args.pages_max = pages;
  args.batch = batch;
  args.heads = heads;
  args.queries = queries;
  args.scale = 0.1f;
  args.shape = shape;
  args.dtype = DType::kBFloat16;
  int64_t layer = 0;
  const std::string name = "paged_attention b" + std::to_string(batch) + " h" +
                           std::to_string(heads) + "/" + std::to_string(kv_heads) + "x" +
                           std::to_string(head_dim) + " G" + std::to_string(group) + " q" +
                           std::to_string(queries) + (in_cache ? " warm" : "");
  measure(name, 1e-9 * batch * pages * shape.payload_bytes(), "GB", [&] {
    layer = (layer + 1) % layers;
    args.pages = table.data() + layer * batch * pages;
    paged_attention(args, {});
  });
  std::vector<float> sums(batch * heads * queries);
  args.log_sum_exp = sums.data();
  args.pages = table.data();
  paged_attention(args, {});
  std::vector<float> mean(batch * kv_heads * pages * group), square(mean.size());
  measure("attention_mass, the same table", 1e-9 * batch * pages * shape.payload_bytes() / 2, "GB",
          [&] {
            layer = (layer + 1) % layers;
            args.pages = table.data() + layer * batch * pages;
            attention_mass({args, mean.data(), square.data()}, {});
          });
}

/// A chunk over as many tokens before it, and over none that is masked.
template <typename T>
void measure_chunk(const std::string& name, DType dtype, int64_t queries, int64_t tokens) {
  const int64_t heads = 32, group = 4;
  const RecordShape shape{8, group, 64, dtype_bytes(dtype)};
  const auto query = random_words<T>(heads * queries * shape.head_dim);
  const int64_t record = shape.payload_bytes() / dtype_bytes(dtype);
  const auto stored = random_words<T>(tokens / group * record);
  std::vector<const void*> records(tokens / group);
  for (size_t i = 0; i < records.size(); ++i) records[i] = stored.data() + i * record;
  std::vector<float> output(queries * heads * shape.head_dim);
  std::vector<float> log_sum_exp(queries * heads, -HUGE_VALF);
  const double products = 2.0 * heads * queries * tokens * shape.head_dim;
  measure(
      "chunk attention " + name + " " + std::to_string(queries) + " x " + std::to_string(tokens),
      2e-9 * products, "GFLOP", [&] {
        chunk_attention({.query = query.data(),
                         .query_head_stride = queries * shape.head_dim,
                         .query_token_stride = shape.head_dim,
                         .output = output.data(),
                         .log_sum_exp = log_sum_exp.data(),
                         .records = records.data(),
                         .tokens = tokens,
                         .query_position = tokens,
                         .heads = heads,
                         .queries = queries,
                         .scale = 0.125f,
                         .shape = shape,
                         .dtype = dtype},
                        {});
      });
}

void measure_fp8() {
  const int64_t rows = 65536, head_dim = 64;
  auto source = random_words<uint16_t>(rows * head_dim);
  std::vector<uint8_t> target(rows * head_dim);
  std::vector<float> scales(rows);
  measure("fp8_quantize bf16, read + write", 3e-9 * target.size(), "GB", [&] {
    fp8_quantize({.source = source.data(),
                  .target = target.data(),
                  .scales = scales.data(),
                  .rows = rows,
                  .head_dim = head_dim,
                  .dtype = DType::kBFloat16},
                 {});
  });
  measure("fp8_dequantize bf16, read + write", 3e-9 * target.size(), "GB", [&] {
    fp8_dequantize({.source = target.data(),
                    .target = source.data(),
                    .scales = scales.data(),
                    .rows = rows,
                    .head_dim = head_dim,
                    .dtype = DType::kBFloat16},
                   {});
  });
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) wanted = arguments[1];
  std::printf("SIMD level %s\n", simd_level().c_str());
  measure_memory();
  for (const int64_t rank : {8, 32, 64}) {
    measure_score(32768, rank, DType::kBFloat16, 1, 128);
  }
  measure_score(32768, 32, DType::kBFloat16, 4, 128);
  measure_score(32768, 32, DType::kInt8, 1, 128);
  measure_score(32768, 32, DType::kFloat16, 1, 128);
  measure_score(32768, 32, DType::kFloat32, 1, 64);
  measure_score(8192, 32, DType::kBFloat16, 1, 1);
  measure_select();
  measure_top_k();
  for (const int64_t rank : {8, 32, 48, 64}) measure_project(rank);
  measure_project_query();
  measure_records();
  measure_attention(8, 32, 8, 64, 4, 1, false);
  measure_attention(8, 32, 8, 64, 4, 1, true);
  measure_attention(1, 32, 8, 64, 4, 1, false);
  measure_attention(8, 32, 8, 128, 4, 1, false);
  measure_attention(8, 8, 8, 64, 4, 1, false);
  measure_attention(8, 8, 4, 64, 4, 1, false);
  measure_attention(8, 32, 8, 64, 16, 1, false);
  measure_attention(8, 32, 2, 64, 4, 1, false);
  measure_attention(8, 32, 8, 64, 4, 8, false);
  for (const int64_t queries : {512, 4096}) {
    measure_chunk<float>("fp32", DType::kFloat32, queries, 4096);
    measure_chunk<uint16_t>("bf16", DType::kBFloat16, queries, 4096);
  }
  measure_fp8();
}
