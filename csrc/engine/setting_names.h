#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "kvswap/settings_rules.h"

namespace kvswap {

/// What messages call a setting, and a word of it; none: as the struct has them.
struct SettingNames {
  std::function<std::string(const std::string& name)> name;
  std::function<std::string(const std::string& name, const std::string& word)> word;
};

/// Where a config file has the setting that Settings calls `name`; null: it is no field of a block.
const ConfigPath* config_path(std::string_view name);
/// "selection.group_tokens": a block and its field.
std::string text_of(const ConfigPath& path);

/// A config file's word for one of Settings': file_word("records", "fp8") is "fp8_e4m3". A keeper
/// that stands for two policies is the first.
std::string file_word(const std::string& name, const std::string& word);

/// Settings in messages as a config file has them, which is what users write.
SettingNames names_of_paths();

}  // namespace kvswap
