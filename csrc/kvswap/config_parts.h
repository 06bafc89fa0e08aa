#pragma once

#include <string>

#include "kvswap/json.h"
#include "kvswap/settings.h"

namespace kvswap {

/// The whole of a file that must be there and readable; else a ConfigError that says
/// "WHERE: must be a readable KIND: why".
std::string read_file(const std::string& path, const std::string& where, const std::string& kind);

/// Names with commas between them.
std::string joined(const std::vector<std::string>& names);

/// Checks one field's value and keeps it; an unknown name is ignored.
void set_field(Settings& settings, const std::string& name, const JsonValue& value);

/// What holds between fields.
void check_together(const Settings& settings);

/// Throws unless each rank lies between 1 and `width`.
void check_ranks(const Rank& rank, int64_t width);

/// The model identity that an object describes.
ModelIdentity identity_from(const JsonValue& object);

}  // namespace kvswap
