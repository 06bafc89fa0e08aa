// What a choice costs: a step's choices in all layers of a model of shape 1b (16 layers, 32 heads,
// 8 KV heads of 64), by the sum over heads and by attention mass. By hand, on a quiet machine:
//   g++ -std=c++20 -O3 -fopenmp -Icsrc -DKVSWAP_HAS_HIGHWAY=1 bench/scoring_bench.cpp
//       csrc/kernels/cpu/*.cpp csrc/methods/*.cpp csrc/device/{device,host_*,table_ring}.cpp
//       csrc/io/{kept_memory,error_text,io_thread}.cpp -o build/scoring_bench
//   build/scoring_bench [LEVEL [ROWS]], such as AVX3 int8; without them all
// Prints medians in wall time, of all threads that OpenMP has (OMP_NUM_THREADS), as JSON lines.
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu_features.h"
#include "methods/make_selector.h"
#include "methods/row_selector.h"

using namespace kvswap;

namespace {

constexpr int64_t kLayers = 16, kHeads = 32, kKvHeads = 8, kHeadDim = 64;
constexpr int64_t kTokens = 32768, kGroupTokens = 4, kGroups = kTokens / kGroupTokens;

void on_all_threads(int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) {
#pragma omp parallel
  {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t begin = count * thread / threads, end = count * (thread + 1) / threads;
    if (begin < end) body(begin, end);
  }
}

std::vector<float> numbers(int64_t count, float size) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = size * normal(random);
  return values;
}

const char* name_of(Score score) {
  return score == Score::kSum ? "sum" : score == Score::kMass ? "mass" : "max_mass";
}

struct Case {
  Score score;
  DType dtype;
  int64_t rank, batch;
};

/// Seconds of a step's choices, the median of many.
double measure(const Case& of) {
  const ParallelFor parallel = on_all_threads;
  const int64_t width = kKvHeads * kHeadDim;
  const auto selector = make_selector({.layers = kLayers,
                                       .heads = kHeads,
                                       .kv_heads = kKvHeads,
                                       .head_dim = kHeadDim,
                                       .group_tokens = kGroupTokens,
                                       .ranks = std::vector<int64_t>(kLayers, of.rank),
                                       .summary_dtype = of.dtype,
                                       .score = of.score,
                                       .parallel = &parallel},
                                      nullptr);
  const auto keys = numbers(kTokens * width, 1);
  const auto query = numbers(of.batch * kHeads * kHeadDim, 1);
  const auto projection = numbers(width * of.rank, 0.04f);
  selector->summaries().set_sequences(of.batch);
  TokenValidity valid;
  valid.append(kTokens, nullptr);
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    if (!selector->set_projection(layer, of.rank, projection.data(), projection.data()).is_ok()) {
      return -1;
    }
    for (int64_t sequence = 0; sequence < of.batch; ++sequence) {
      SealedKeys sealed;
      sealed.layer = layer;
      sealed.sequence = sequence;
      sealed.keys = {keys.data(), kTokens * kHeadDim, kHeadDim, DType::kFloat32};
      sealed.tokens = kTokens;
      if (!selector->append(sealed).is_ok()) return -1;
    }
  }
  const std::vector<int32_t> sinks = {0};
  const std::vector<Candidates> candidates(of.batch, {&valid, sinks});
  std::vector<std::vector<int32_t>> chosen;
  std::vector<double> seconds;
  const auto step = [&] {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      ChooseArgs args;
      args.layer = layer;
      args.query = {query.data(),   kHeads * kHeadDim, kHeadDim, kHeadDim, kHeads, 1,
                    DType::kFloat32};
      args.groups = kGroups;
      args.groups_per_query = 100;
      args.candidates = candidates;
      args.chosen = &chosen;
      args.scale = 0.125f;
      selector->choose(args);
    }
  };
  step();
  for (int i = 0; i < 15; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    step();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + 7, seconds.end());
  return seconds[7];
}

}  // namespace

int main(int argc, char** argv) {
  const char* names[] = {"fp32", "bf16", "fp16", "int8"};
  for (const std::string& level : simd_levels()) {
    if (argc > 1 ? level != argv[1] : level == "SCALAR") continue;
    if (!use_simd_level(level)) continue;
    for (const DType dtype : {DType::kInt8, DType::kBFloat16, DType::kFloat32}) {
      if (argc > 2 && names[static_cast<int>(dtype)] != std::string(argv[2])) continue;
      for (const int64_t batch : {1, 8}) {
        const double sum = measure({Score::kSum, dtype, 32, batch});
        const double mass = measure({Score::kMass, dtype, 32, batch});
        std::printf(
            "{\"shape\": \"1b\", \"context\": %ld, \"batch\": %ld, \"rank\": 32, \"rows\": \"%s\", "
            "\"simd\": \"%s\", \"threads\": %d, \"ms\": {\"%s\": %.3f, \"%s\": %.3f}, "
            "\"ratio\": %.2f}\n",
            static_cast<long>(kTokens), static_cast<long>(batch), names[static_cast<int>(dtype)],
            level.c_str(), omp_get_max_threads(), name_of(Score::kSum), sum * 1e3,
            name_of(Score::kMass), mass * 1e3, mass / sum);
        std::fflush(stdout);
      }
    }
  }
  return 0;
}
