#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "kvswap/model_shape.h"

namespace kvswap {

/// Where the projections of a cache's layers came from.
enum class ProjectionSource { kNone, kEstimated, kGiven };

/// What a cache has done and what it takes, by name.
struct Report {
  std::map<std::string, double> counters;  // bytes, seconds, counts
  /// reader, io_mode, simd, device, fallbacks (one a line).
  std::map<std::string, std::string> facts;
  /// Bytes by use, as charged against the budget, with total, peak and limit.
  std::map<std::string, int64_t> ledger;
  ModelShape shape;
  int64_t batch = 0;
  int64_t positions = 0;                                   // of the first layer
  ProjectionSource projections = ProjectionSource::kNone;  // of the layer that got most
  int64_t predictor_bytes = 0;                             // beside the ledger's
};

/// What Python's CacheStats prints: a name and a value a line.
std::string report_text(const Report& report);

}  // namespace kvswap
