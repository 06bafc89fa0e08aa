#include "kernels/paged_gather.h"

#include <cstring>

namespace kvswap {
namespace {

/// K and V of one KV head of one sequence.
void gather_head(const PagedGatherArgs& args, int64_t sequence, int64_t kv_head) {
  const int64_t table = sequence * args.table_heads + (args.table_heads == 1 ? 0 : kv_head);
  const int64_t head_in_page = args.shape.kv_heads == 1 ? 0 : kv_head;
  const int64_t key_bytes = args.shape.side_elements(0) * args.shape.element_bytes;
  const int64_t value_bytes = args.shape.side_elements(1) * args.shape.element_bytes;
  const int64_t first = (sequence * args.kv_heads() + kv_head) * args.pages_max;
  for (int64_t page = 0; page < args.pages_max; ++page) {
    char* keys = static_cast<char*>(args.keys) + (first + page) * key_bytes;
    char* values = static_cast<char*>(args.values) + (first + page) * value_bytes;
    const void* base = args.pages[table * args.pages_max + page];
    if (!base) {
      std::memset(keys, 0, key_bytes);
      std::memset(values, 0, value_bytes);
      continue;
    }
    const char* source = static_cast<const char*>(base) +
                         head_in_page * args.shape.head_elements() * args.shape.element_bytes;
    std::memcpy(keys, source, key_bytes);
    std::memcpy(values, source + args.shape.value_elements() * args.shape.element_bytes,
                value_bytes);
  }
}

}  // namespace

void paged_gather(const PagedGatherArgs& args, const Execution& execution) {
  const int64_t kv_heads = args.kv_heads();
  run_parallel(execution, args.batch * kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) gather_head(args, i / kv_heads, i % kv_heads);
  });
}

}  // namespace kvswap
