// The ledger holds all that is allocated: by the allocator's own count of the heap, and that of
// what is mapped, from before a cache is opened until it has read a prompt and decoded.

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "kvswap/cache.h"
#include "saved_run.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KVSWAP_COUNTS_ALLOCATIONS 0  // a sanitizer's allocator is another
#else
#define KVSWAP_COUNTS_ALLOCATIONS 1
#endif

#if KVSWAP_COUNTS_ALLOCATIONS

namespace {

struct Mapping {
  char* at = nullptr;
  int64_t bytes = 0;
};

std::atomic<int64_t> mapped_bytes{0};
// Addresses that are set aside for what may come; of these only what is in memory counts.
constexpr int kMost = 64;
std::array<Mapping, kMost> set_aside;
std::mutex set_aside_mutex;

void note(Mapping mapping) {
  const std::lock_guard lock(set_aside_mutex);
  const auto free = std::ranges::find(set_aside, nullptr, &Mapping::at);
  if (free == set_aside.end()) std::abort();
  *free = mapping;
}

/// Was it one of them?
bool forget(void* at) {
  const std::lock_guard lock(set_aside_mutex);
  const auto found = std::ranges::find(set_aside, static_cast<char*>(at), &Mapping::at);
  if (found == set_aside.end()) return false;
  *found = {};
  return true;
}

int64_t set_aside_in_memory() {
  const std::lock_guard lock(set_aside_mutex);
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  std::vector<unsigned char> is_there;
  int64_t pages = 0;
  for (const Mapping& mapping : set_aside) {
    if (mapping.at == nullptr) continue;
    is_there.assign((mapping.bytes + page - 1) / page, 0);
    if (::mincore(mapping.at, mapping.bytes, is_there.data()) != 0) std::abort();
    pages += std::ranges::count_if(is_there, [](unsigned char there) { return (there & 1) != 0; });
  }
  return pages * page;
}

}  // namespace

// In the place of libc's, for everything that is linked into this program. The heap's own
// mappings do not come by here: mallinfo2 has them.
extern "C" void* mmap(void* at, size_t bytes, int protection, int flags, int file,
                      off_t offset) noexcept {
  const long mapped = ::syscall(SYS_mmap, at, bytes, protection, flags, file, offset);
  if (mapped != -1 && (flags & MAP_ANONYMOUS) != 0) {
    if ((flags & MAP_NORESERVE) != 0) {
      note({reinterpret_cast<char*>(mapped), static_cast<int64_t>(bytes)});
    } else {
      mapped_bytes += static_cast<int64_t>(bytes);
    }
  }
  return reinterpret_cast<void*>(mapped);
}

extern "C" int munmap(void* at, size_t bytes) noexcept {
  if (!forget(at)) mapped_bytes -= static_cast<int64_t>(bytes);
  return static_cast<int>(::syscall(SYS_munmap, at, bytes));
}

namespace kvswap {
namespace {

constexpr int64_t kTokens = 2000;
constexpr int64_t kSteps = 40;
const ModelShape kShape = {.layers = 4, .heads = 8, .kv_heads = 4, .head_dim = 64};

int64_t allocated_bytes() {
  const auto heap = ::mallinfo2();
  return static_cast<int64_t>(heap.uordblks + heap.hblkhd) + mapped_bytes.load() +
         set_aside_in_memory();
}

struct Configuration {
  std::string name;
  std::function<void(CacheOptions&)> set;
};

std::vector<Configuration> configurations() {
  using O = CacheOptions;
  const std::vector<Configuration> kinds = {
      {"low_rank", [](O&) {}},
      {"low_rank_int8", [](O& o) { o.settings.summary_dtype = "int8"; }},
      {"low_rank_int4", [](O& o) { o.settings.summary_dtype = "int4"; }},
      {"mass", [](O& o) { o.settings.score = "mass"; }},
      {"two_rankings", [](O& o) { o.settings.score_columns = 8; }},
      {"min_max", [](O& o) { o.settings.rows = "box"; }},
      {"mean", [](O& o) { o.settings.rows = "mean"; }},
      {"each_head", [](O& o) { o.settings.heads = "each"; }},
      {"groups_of_16", [](O& o) { o.settings.group_tokens = 16; }},
      {"fp8", [](O& o) { o.settings.records = "fp8"; }},
      {"int4", [](O& o) { o.settings.records = "int4"; }},
      {"shared_pages", [](O& o) { o.settings.resident_layers = 2; }},
      {"no_prefetch", [](O& o) { o.settings.look_ahead = "off"; }},
      {"long_tail", [](O& o) { o.settings.tail_tokens = 512; }},
      {"exact_layer", [](O& o) { o.settings.exact_layers = {1}; }},
  };
  std::vector<Configuration> all;
  for (const ElementType dtype : {ElementType::kFloat32, ElementType::kBFloat16}) {
    for (const Configuration& kind : kinds) {
      all.push_back({kind.name + "_" + element_name(dtype), [dtype, kind](O& options) {
                       options.shape.dtype = dtype;
                       kind.set(options);
                     }});
    }
  }
  return all;
}

/// Arrays of a program's, that are not the cache's.
class Program {
 public:
  explicit Program(const ModelShape& shape)
      : shape_(shape),
        keys_(shape.kv_heads * kTokens * shape.head_dim * shape.element_bytes(), 0x3c),
        query_(shape.heads * kTokens * shape.head_dim * shape.element_bytes(), 0x3c),
        output_(query_.size()) {}

  void pass(Cache& cache, Pass pass, int64_t tokens) {
    cache.begin_pass(pass);
    for (int64_t layer = 0; layer < shape_.layers; ++layer) {
      cache.append(layer, NewTokens::packed(keys_.data(), keys_.data(), shape_, 1, tokens));
      const auto query = Queries::packed(query_.data(), shape_.heads, tokens, shape_.head_dim);
      cache.attend(layer, query, 0.125f, output_.data());
    }
  }

 private:
  ModelShape shape_;
  std::vector<char> keys_, query_, output_;
};

Projection projection_of(const CacheOptions& options) {
  const int64_t width = options.shape.width();
  const int64_t rank = std::get<int64_t>(options.settings.rank);
  return {width, rank, std::vector<float>(width * rank, 0.1f), std::vector<float>(width * rank, 1)};
}

class AllocatedMemory : public testing::TestWithParam<Configuration> {};

TEST_P(AllocatedMemory, IsInTheLedger) {
  const Folder folder;
  CacheOptions options;
  options.shape = kShape;
  options.directory = folder.path();
  options.settings.rank = 32;
  GetParam().set(options);
  Program program(options.shape);
  const Projection projection = projection_of(options);

  const int64_t before = allocated_bytes();
  Cache cache(options);
  if (options.settings.rows == "low_rank") {
    for (int64_t layer = 0; layer < kShape.layers; ++layer) {
      if (options.settings.exact_layers != std::vector<int64_t>{layer}) {
        cache.set_projection(layer, projection);
      }
    }
  }
  program.pass(cache, Pass::kPrefill, kTokens);
  for (int64_t step = 0; step < kSteps; ++step) program.pass(cache, Pass::kDecode, 1);

  program.pass(cache, Pass::kPrefill, 500);

  const int64_t allocated = allocated_bytes() - before;
  const std::map<std::string, int64_t> ledger = cache.report().ledger;
  EXPECT_LE(allocated, ledger.at("total"));
  // Staging is charged at the beginning, and allocated by the first call that goes through it.
  EXPECT_GE(allocated, ledger.at("total") - ledger.at("staging"));
}

INSTANTIATE_TEST_SUITE_P(Configurations, AllocatedMemory, testing::ValuesIn(configurations()),
                         [](const auto& configuration) { return configuration.param.name; });

}  // namespace
}  // namespace kvswap

#endif
