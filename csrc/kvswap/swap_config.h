#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvswap/model_shape.h"
#include "kvswap/settings.h"

namespace kvswap {

/// The settings found best for one batch size and context length.
struct Solution {
  int64_t batch = 0;
  int64_t context = 0;
  Settings settings;  // whole: the config's own where the file's row says nothing

  bool operator==(const Solution&) const = default;
};

/// A config file, as kvswap_torch.SwapConfig.save() and the tuner write it.
///
///   const SwapConfig config = SwapConfig::load("config.json");
///   config.check_model({.layers = 28, .heads = 16, .kv_heads = 8, .head_dim = 128});
///   const Settings settings = config.for_batch_and_context(1, 32768);
///
/// A default-constructed one has SwapConfig's defaults and no file.
struct SwapConfig {
  Settings settings;
  std::optional<ModelIdentity> model;
  std::vector<Solution> table;
  std::string source;  // the file it came from

  /// Reads a file. Throws ConfigError where Python's SwapConfig.load() does: a missing file,
  /// corrupt JSON, an unknown field or version, or a value out of range.
  static SwapConfig load(const std::string& path);

  /// The exact pair's solution or the nearest one's, in doublings of batch and context; of two
  /// equally near the longer context's, then the larger batch's. Without a table its settings.
  const Settings& for_batch_and_context(int64_t batch, int64_t context) const;

  /// Throws ConfigError naming each thing in which the model differs from the config's, and for
  /// ranks that do not fit it.
  void check_model(const ModelIdentity& identity) const;

  /// Where a projection file lies: beside the config. Empty when there is none.
  std::string projection_path() const;
};

/// The rank of each of `layers` layers; throws ConfigError when there is one a layer, for another
/// number of layers.
std::vector<int64_t> ranks_of(const Settings& settings, int64_t layers);

/// Elements of one token's K that make one row of a summary, the most columns it can have: of all
/// KV heads, or of one where each chooses for itself.
int64_t row_width(const Settings& settings, int64_t kv_heads, int64_t head_dim);

/// A model's identity from its shape; `model_type` may be empty: not compared.
ModelIdentity identity_of(const ModelShape& shape, const std::string& model_type);

/// "name ours (this model: theirs)" for each field that both know and that differs, joined by
/// commas; empty when nothing does.
std::string differences(const ModelIdentity& ours, const ModelIdentity& theirs);

}  // namespace kvswap
