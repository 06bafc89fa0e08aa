// What a step's choices cost in one stage and in two, layer after layer, over int8 rows of 32
// columns, at several sizes of the context: `python -m bench.stages` builds and runs it.
//   stages_bench LAYERS KV_HEADS HEAD_DIM COLUMNS SHARE THREADS TOKENS...
// The ways take turns in each repetition. Prints a JSON line for each size.
#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <random>
#include <vector>

#include "methods/make_selector.h"
#include "methods/summaries.h"

using namespace kvswap;

namespace {

constexpr int64_t kGroupTokens = 4, kChosen = 100, kRank = 32;
constexpr int64_t kPiece = 4096;  // tokens appended at once
constexpr int kTimes = 21;

struct Setting {
  int64_t layers = 0, kv_heads = 0, head_dim = 0, columns = 0;
  double share = 0;
  int64_t width() const { return kv_heads * head_dim; }
};

void on_all_threads(int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) {
#pragma omp parallel
  {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t begin = count * thread / threads, end = count * (thread + 1) / threads;
    if (begin < end) body(begin, end);
  }
}

const ParallelFor kParallel = on_all_threads;

double now_ms() {
  timespec now = {};
  clock_gettime(omp_get_max_threads() == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

void fill(std::vector<float>& values, float size, std::mt19937& random) {
  for (float& value : values) {  // roughly normal, and fast
    const uint32_t bits = random();
    const uint32_t sum = (bits & 0xff) + (bits >> 8 & 0xff) + (bits >> 16 & 0xff) + (bits >> 24);
    value = size * (static_cast<float>(sum) - 510.0f) / 148.0f;
  }
}

/// A selector of one way, and its choices of a step.
class Way {
 public:
  Way(const Setting& of, bool is_staged, const std::vector<float>& projection) : setting_(of) {
    selector_ = make_selector({.layers = of.layers,
                               .heads = of.kv_heads,
                               .kv_heads = of.kv_heads,
                               .head_dim = of.head_dim,
                               .group_tokens = kGroupTokens,
                               .ranks = std::vector<int64_t>(of.layers, kRank),
                               .summary_dtype = DType::kInt8,
                               .score_columns = is_staged ? of.columns : 0,
                               .score_share = of.share,
                               .parallel = &kParallel},
                              nullptr);
    for (int64_t layer = 0; layer < of.layers; ++layer) {
      if (!selector_->set_projection(layer, kRank, projection.data(), projection.data()).is_ok()) {
        std::abort();
      }
    }
    selector_->summaries().set_sequences(1);
    valid_.append(0, nullptr);
  }

  void append(const std::vector<float>& keys) {
    for (int64_t layer = 0; layer < setting_.layers; ++layer) {
      const SealedKeys sealed = {
          .layer = layer,
          .keys = {keys.data(), kPiece * setting_.head_dim, setting_.head_dim, DType::kFloat32},
          .tokens = kPiece};
      if (!selector_->append(sealed).is_ok()) std::abort();
    }
    valid_.append(kPiece, nullptr);
    tokens_ += kPiece;
  }

  /// Milliseconds of a step's choices: of the processor where there is one thread, so that who
  /// computes beside it counts less; else in wall time.
  double step(const std::vector<float>& query) {
    const Candidates candidates = {&valid_, sinks_};
    const double began = now_ms();
    for (int64_t layer = 0; layer < setting_.layers; ++layer) {
      ChooseArgs args;
      args.layer = layer;
      args.query = {query.data(),      setting_.width(),  setting_.head_dim,
                    setting_.head_dim, setting_.kv_heads, 1,
                    DType::kFloat32};
      args.groups = tokens_ / kGroupTokens;
      args.groups_per_query = kChosen;
      args.candidates = {&candidates, 1};
      args.chosen = &chosen_;
      selector_->choose(args);
    }
    return now_ms() - began;
  }

 private:
  Setting setting_;
  std::unique_ptr<Selector> selector_;
  TokenValidity valid_;
  std::vector<int32_t> sinks_ = {0};
  int64_t tokens_ = 0;
  std::vector<std::vector<int32_t>> chosen_;
};

void print_way(const char* name, std::vector<double>& ms) {
  std::sort(ms.begin(), ms.end());
  std::printf("\"%s\": [%.4f, %.4f, %.4f]", name, ms[ms.size() / 2], ms[ms.size() / 4],
              ms[ms.size() * 3 / 4]);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 8) return 2;
  const Setting of = {std::atol(argv[1]), std::atol(argv[2]), std::atol(argv[3]),
                      std::atol(argv[4]), std::atof(argv[5])};
  omp_set_num_threads(std::atoi(argv[6]));
  std::mt19937 random(5);
  std::vector<float> projection(of.width() * kRank), keys(of.width() * kPiece), query(of.width());
  fill(projection, 0.06f, random);
  Way ways[] = {{of, false, projection}, {of, true, projection}};
  int64_t tokens = 0;
  for (int i = 7; i < argc; ++i) {
    for (; tokens < std::atol(argv[i]); tokens += kPiece) {
      fill(keys, 1, random);
      for (Way& way : ways) way.append(keys);
    }
    std::vector<double> ms[2];
    for (int time = 0; time <= kTimes; ++time) {
      fill(query, 1, random);
      for (int turn = 0; turn < 2; ++turn) {
        const int way = (turn + time) % 2;
        const double taken = ways[way].step(query);
        if (time > 0) ms[way].push_back(taken);
      }
    }
    std::printf("{\"context\": %ld, ", static_cast<long>(tokens));
    print_way("one", ms[0]);
    std::printf(", ");
    print_way("two", ms[1]);
    std::printf("}\n");
    std::fflush(stdout);
  }
  return 0;
}
