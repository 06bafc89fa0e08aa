#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/snapshot/parent_files.h"
#include "kvswap/model_shape.h"
#include "kvswap/settings.h"

namespace kvswap {

/// What a saved cache's manifest says.
struct SavedManifest {
  ModelShape shape;
  Settings settings;
  std::vector<int64_t> ranks;  // [layers]; empty where rows have none
  SavedCounts counts;
  int64_t state_bytes = 0;
  uint64_t state_checksum = 0;
  int64_t records_bytes = 0;
  std::string facts = "{}";  // the program's own, JSON
};

/// 5 has values narrower than keys, 4 clusters, 3 retained tokens, and each is written for caches
/// that have some; in 2 settings are in blocks; 1 is read too.
inline constexpr int64_t kSavedVersion = 5;

/// Throws ConfigError for facts that are no JSON object.
std::string manifest_text(const SavedManifest& manifest);

/// Everything checked against the rest; throws ConfigError for a newer version and SessionError
/// (kCorrupt) for what is damaged. `path`: the cache's, for messages.
SavedManifest read_manifest(const std::string& text, const std::string& path);

}  // namespace kvswap
