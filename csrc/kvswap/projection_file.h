#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvswap/settings.h"

namespace kvswap {

/// A layer's pair of low-rank matrices; the first r columns are the projection of rank r.
struct Projection {
  int64_t width = 0;
  int64_t rank = 0;
  std::vector<float> keys;     // [width, rank]
  std::vector<float> queries;  // [width, rank]

  /// The first columns of it.
  Projection cut(int64_t columns) const;
};

/// Reads a projection for each layer on disk, cut to that layer's rank, from the safetensors file
/// that calibration writes (tensors layers.{i}.key and layers.{i}.query, [width, columns]).
///
/// `width` is kv_heads * head_dim; `model`, the model it will be used with, is compared with the
/// one in the file; `heads`, all or each, with what it was calibrated for: one projection of all KV
/// heads, or one for each, one after the other. Throws ConfigError where Python's
/// load_projections() does: a missing or broken file, another model's, a missing layer, a wrong
/// shape, numbers that are not finite.
std::vector<Projection> load_projections(const std::string& path, std::span<const int64_t> ranks,
                                         int64_t width, const ModelIdentity& model,
                                         const std::string& heads = "all");

}  // namespace kvswap
