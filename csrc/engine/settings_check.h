#pragma once

#include <string>

#include "engine/setting_names.h"
#include "io/status.h"
#include "kvswap/settings.h"

namespace kvswap {

/// The first rule that a setting breaks, by the table of settings: "name: must be ..., got ...";
/// ok: none.
Status check_settings(const Settings& settings, const SettingNames& names = {});

/// Does a layer attend everything, whatever its queries are?
bool is_exact(const Settings& settings, int64_t layer);

/// Every setting by name, as a JSON object.
std::string settings_json(const Settings& settings);

}  // namespace kvswap
