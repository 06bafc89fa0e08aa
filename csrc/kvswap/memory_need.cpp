#include <stdexcept>

#include "kvswap/cache_options.h"
#include "kvswap/engine_calls.h"

namespace kvswap {

std::map<std::string, int64_t> memory_need(const CacheOptions& options, int64_t batch,
                                           int64_t context, int64_t alignment_bytes) {
  const EngineOptions engine = engine_options(options);
  throw_status(engine.validate());
  if (batch < 0 || context < 0 || alignment_bytes < 1) {
    throw std::invalid_argument("memory_need: batch, context and alignment must not be negative");
  }
  const int64_t record_bytes =
      (engine.payload_bytes() + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
  const MemoryNeed need = memory_need(engine, record_bytes, batch, context);
  return {
      {"pages", need.pages},         {"kept", need.kept},
      {"summary", need.summary},     {"tables", need.tables},
      {"staging", need.staging},     {"projections", need.projections},
      {"scratch", need.scratch},     {"device", need.device},
      {"pinned", need.pinned},       {"timeline", need.timeline},
      {"total", need.total()},       {"least", least_budget(engine, record_bytes, batch, context)},
      {"record_bytes", record_bytes}};
}

}  // namespace kvswap
