#pragma once

#include <string>

#include "kvswap/swap_config.h"

namespace kvswap {

// What is written as JSON, by the table of settings. Each throws ConfigError for text that is no
// JSON or says what may not be, and in a build without nlohmann-json.

/// The text of a config file; `where` begins the messages.
SwapConfig config_from_json(const std::string& text, const std::string& where);

/// The model that a projection file's metadata names.
ModelIdentity identity_from_json(const std::string& text);

/// Settings alone, every one, in blocks. A saved cache's: without a projection file.
std::string settings_to_json(const Settings& settings);
/// `version`: 1 for flat ones, 2 for blocks.
Settings settings_from_json(const std::string& text, int64_t version);

}  // namespace kvswap
