#include <algorithm>

#include "engine/settings_check.h"
#include "io/host_info.h"
#include "kvswap/cache_options.h"
#include "kvswap/errors.h"

namespace kvswap {
namespace {

constexpr int64_t kAlignmentUnknown = 4096;
constexpr int64_t kAlignmentOfMemory = 512;  // as a MemoryFile's

/// Columns to read of each layer: the widest rank that the config or a solution of it asks for.
std::vector<int64_t> widest_ranks(const SwapConfig& config, int64_t layers) {
  std::vector<int64_t> widest = ranks_of(config.settings, layers);
  for (const Solution& row : config.table) {
    const std::vector<int64_t> ranks = ranks_of(row.settings, layers);
    for (int64_t layer = 0; layer < layers; ++layer) {
      widest[layer] = std::max(widest[layer], ranks[layer]);
    }
  }
  return widest;
}

int64_t alignment_of(const std::string& directory) {
  if (directory.empty()) return kAlignmentOfMemory;
  const auto probe = probe_directory(directory);
  return probe.is_ok() ? probe.value().alignment_bytes : kAlignmentUnknown;
}

/// Predictors are there where the settings look ahead.
int64_t predictor_bytes(const OpenArgs& args, const Settings& settings) {
  return settings.look_ahead != "off" ? args.predictor_bytes : 0;
}

/// What the session itself may take of the budget.
Budget without_predictor(const OpenArgs& args, const Settings& settings) {
  Budget budget = args.budget;
  if (budget.kv_memory_bytes) {
    budget.kv_memory_bytes =
        std::max<int64_t>(1, *budget.kv_memory_bytes - predictor_bytes(args, settings));
  }
  return budget;
}

}  // namespace

Opening prepare(const OpenArgs& args) {
  Opening opening;
  opening.options = {.shape = args.shape,
                     .settings = {},
                     .ranks = {},
                     .directory = args.directory,
                     .device = args.device,
                     .budget = args.budget,
                     .timeline_spans = args.timeline_spans,
                     .threads = args.threads};
  std::optional<SwapConfig> config;
  if (!args.config_path.empty()) {
    config = SwapConfig::load(args.config_path);
    const ModelIdentity identity = identity_of(args.shape, args.model_type);
    config->check_model(identity);
    if (config->settings.projection_file) {
      opening.projections =
          load_projections(config->projection_path(), widest_ranks(*config, args.shape.layers),
                           args.shape.width(), identity, config->settings.heads);
    }
  }
  const bool calibrated = !opening.projections.empty();
  std::optional<int64_t> alignment;  // looked up when a budget asks for it
  const Need need = [&](const Settings& settings, int64_t batch, int64_t context) {
    if (!alignment) alignment = alignment_of(args.directory);
    CacheOptions candidate = opening.options;
    candidate.settings = settings;
    candidate.budget = without_predictor(args, settings);
    candidate.ranks = effective_ranks(settings, args.shape, calibrated);
    auto uses = memory_need(candidate, batch, context, *alignment);
    uses["predictor"] = predictor_bytes(args, settings);
    uses["total"] += predictor_bytes(args, settings);
    uses["least"] += predictor_bytes(args, settings);
    return uses;
  };
  opening.options.settings = settle(config ? &*config : nullptr, args.shape, args.budget, need,
                                    args.first ? &*args.first : nullptr, args.device != "cpu");
  opening.options.budget = without_predictor(args, opening.options.settings);
  opening.options.predictor_bytes = predictor_bytes(args, opening.options.settings);
  opening.options.ranks = effective_ranks(opening.options.settings, args.shape, calibrated);
  // A budget may have lowered the rank; the first columns are the projection of that rank.
  for (size_t layer = 0; layer < opening.projections.size(); ++layer) {
    opening.projections[layer] = opening.projections[layer].cut(opening.options.ranks[layer]);
  }
  return opening;
}

}  // namespace kvswap
