#include "engine/setting_names.h"

#include <sstream>

namespace kvswap {

const ConfigPath* config_path(std::string_view name) {
  for (const ConfigPath& path : kConfigPaths) {
    if (path.name == name) return &path;
  }
  return nullptr;
}

std::string text_of(const ConfigPath& path) { return std::string(path.block) + "." + path.field; }

std::string file_word(const std::string& name, const std::string& word) {
  if (name == "grouping") return word == "runs" ? "absent" : "present";
  if (name == "keeper") {
    for (const ConfigPolicy& policy : kConfigPolicies) {
      if (word == policy.keeper) return policy.policy;
    }
    return "none";
  }
  const ConfigPath* path = config_path(name);
  std::istringstream pairs(path ? path->words : "");
  for (std::string pair; pairs >> pair;) {
    const size_t middle = pair.find('=');
    if (pair.substr(middle + 1) == word) return pair.substr(0, middle);
  }
  return word;
}

SettingNames names_of_paths() {
  return {.name =
              [](const std::string& name) {
                const ConfigPath* path = config_path(name);
                return path                 ? text_of(*path)
                       : name == "grouping" ? std::string("clusters")
                       : name == "keeper"   ? std::string("retention.policy")
                                            : name;
              },
          .word = &file_word};
}

}  // namespace kvswap
