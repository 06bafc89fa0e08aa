#include "engine/memory/memory_estimate.h"

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
  const Arena need = memory_need(engine, record_bytes, batch, context);
  std::map<std::string, int64_t> bytes = {
      {"total", need.total()},
      {"least", least_budget(engine, record_bytes, batch, context)},
      {"record_bytes", record_bytes}};
  for (int use = 0; use < kUses; ++use) {
    bytes[use_name(static_cast<Use>(use))] = need.of(static_cast<Use>(use));
  }
  return bytes;
}

}  // namespace kvswap
