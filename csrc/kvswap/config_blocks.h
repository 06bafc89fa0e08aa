#pragma once

#include "kvswap/json.h"
#include "kvswap/settings.h"

#if KVSWAP_HAS_JSON

namespace kvswap {

// A config file of version 2: settings in blocks. The flat struct's names and words are translated
// by the table that kvswap_torch/config writes (settings_rules.h). Each throws ConfigError.

/// The settings that a file's blocks make; other fields of the object are not looked at.
Settings settings_from_blocks(const Json& fields);

/// The blocks that make these settings, every setting of them.
Json blocks_of(const Settings& settings);

/// `fields` with settings changed by their paths, as a solution has them: "selection.top_k_groups",
/// or the name of a block that may be absent. A block that is absent is made where one of its
/// settings is named; another retention.policy starts from that policy's defaults.
Json with_changes(const Json& fields, const Json& changes);

}  // namespace kvswap

#endif
