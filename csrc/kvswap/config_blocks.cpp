#include "kvswap/config_blocks.h"

#if KVSWAP_HAS_JSON

#include <map>
#include <sstream>
#include <type_traits>
#include <utility>

#include "engine/setting_names.h"
#include "engine/settings_check.h"
#include "kvswap/json_fields.h"
#include "kvswap/settings_rules.h"

namespace kvswap {
namespace {

constexpr const char* kPolicyPath = "retention.policy";

std::vector<std::string> words_of(const char* text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

/// Words of a file for the struct's: (new, old). Empty: they are the same.
using Words = std::vector<std::pair<std::string, std::string>>;

Words pairs_of(const char* text) {
  Words pairs;
  for (const std::string& pair : words_of(text)) {
    const size_t middle = pair.find('=');
    pairs.emplace_back(pair.substr(0, middle), pair.substr(middle + 1));
  }
  return pairs;
}

const ConfigPolicy* policy_of(const Json& name) {
  // Not with name == policy.policy, which makes a value of the text and may not throw.
  const auto* text = name.get_ptr<const std::string*>();
  for (const ConfigPolicy& policy : kConfigPolicies) {
    if (text != nullptr && *text == policy.policy) return &policy;
  }
  return nullptr;
}

bool has_field(const ConfigPolicy& policy, const std::string& name) {
  const std::vector<std::string> fields = words_of(policy.fields);
  return std::find(fields.begin(), fields.end(), name) != fields.end();
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

std::string policies() {
  std::vector<std::string> names;
  for (const ConfigPolicy& policy : kConfigPolicies) names.emplace_back(policy.policy);
  return listed(names);
}

/// The block of that name, checked for fields that it does not have; null: there is none.
const Json* block_of(const Json& fields, const ConfigBlock& block) {
  const Json* found = find_field(fields, block.name);
  if (found == nullptr || (found->is_null() && block.is_optional)) return nullptr;
  if (!found->is_object()) {
    refuse(block.name, block.is_optional ? "a block of settings or null" : "a block of settings",
           *found);
  }
  std::vector<std::string> known;
  for (const ConfigPath& path : kConfigPaths) {
    if (std::string_view(path.block) == block.name) known.emplace_back(path.field);
  }
  if (std::string_view(block.name) != "retention") {
    check_names(std::string(block.name) + ": fields must be among", *found, known);
    return found;
  }
  const Json* name = find_field(*found, "policy");
  const ConfigPolicy* policy = name ? policy_of(*name) : nullptr;
  if (policy == nullptr) refuse(kPolicyPath, "one of " + policies(), name ? *name : Json());
  for (const auto& [field, value] : found->items()) {
    if (field == "policy" || has_field(*policy, field)) continue;
    std::vector<std::string> owners;
    for (const ConfigPolicy& other : kConfigPolicies) {
      if (has_field(other, field)) owners.emplace_back(other.policy);
    }
    if (owners.empty()) {
      known.insert(known.begin(), "policy");
      check_names("retention: fields must be among", *found, known);
    }
    throw ConfigError("retention." + field + ": is not an option of policy '" + policy->policy +
                      "' (only of " + listed(owners) + "), got " + shown(value));
  }
  return found;
}

template <typename T>
bool take_word(const std::string& word, T& field) {
  if constexpr (std::is_same_v<T, bool>) {
    field = word == "true";
    return true;
  } else if constexpr (std::is_assignable_v<T&, std::string>) {
    field = word;
    return true;
  } else {
    return false;
  }
}

/// A setting's value from a file. Null where a default depends on others: `selection.score`.
template <typename T, typename Rule>
void read_setting(const ConfigPath& path, const Json& value, const Rule& rule, T& field) {
  const Words words = pairs_of(path.words);
  if (words.empty()) {
    if (!take(value, field) || !holds(rule, field)) refuse(text_of(path), rule.words(), value);
    return;
  }
  std::vector<std::string> known;
  for (const auto& [ours, theirs] : words) {
    if (value.is_string() && value == ours && take_word(theirs, field)) return;
    known.push_back(ours);
  }
  refuse(text_of(path), "one of " + listed(known), value);
}

/// Takes a score away that is its summary's default: another summary has its own.
void forget_default_score(Json& fields) {
  const Json* summary = find_field(fields, "summary");
  const Json* kind = summary ? find_field(*summary, "kind") : nullptr;
  const bool is_low_rank = kind == nullptr || *kind == "low_rank";
  const char* usual = is_low_rank ? kScoreOfLowRank : kScoreOfOthers;
  if (find_field(fields, "selection") == nullptr) return;
  Json& selection = fields["selection"];
  const Json* score = find_field(selection, "score");
  if (score != nullptr && *score == file_word("score", usual)) selection.erase("score");
}

}  // namespace

Settings settings_from_blocks(const Json& fields) {
  Settings settings;
  std::map<std::string, const Json*> blocks;
  for (const ConfigBlock& block : kConfigBlocks) blocks[block.name] = block_of(fields, block);
  bool has_score = false;
  visit_settings([&](const char* name, auto member, const auto& rule) {
    const ConfigPath* path = config_path(name);
    const Json* block = path ? blocks.at(path->block) : nullptr;
    const Json* value = block ? find_field(*block, path->field) : nullptr;
    const bool is_score = std::string_view(name) == "score";
    if (value == nullptr || (is_score && value->is_null())) return;
    has_score = has_score || is_score;
    read_setting(*path, *value, rule, settings.*member);
  });
  if (const Json* retention = blocks.at("retention")) {
    const Json& policy = retention->at("policy");
    settings.keeper = policy_of(policy)->keeper;
    // Of the flat struct it is two settings that each may be empty.
    if (policy == "compresskv" && settings.rows != "none") {
      throw ConfigError(std::string(kPolicyPath) + ": must be left out where summary.kind is " +
                        file_word("rows", settings.rows) + ", since it belongs to none, got " +
                        shown(policy));
    }
  }
  settings.grouping = blocks.at("clusters") ? "clusters" : "runs";
  if (const Json* audit = blocks.at("audit")) {
    const Json* interval = find_field(*audit, "interval");
    if (interval != nullptr && settings.audit_every < 1) {
      refuse("audit.interval", IntRange{1, 1 << 20}.words(), *interval);
    }
    if (interval == nullptr) settings.audit_every = kAuditInterval;
  }
  // Other summaries do not have every token's logit.
  if (!has_score) {
    settings.score = settings.rows == "low_rank" ? kScoreOfLowRank : kScoreOfOthers;
  }
  const Status checked = check_settings(settings, names_of_paths());
  if (!checked.is_ok()) throw ConfigError(checked.message());
  return settings;
}

Json blocks_of(const Settings& settings) {
  Json blocks = Json::object();
  for (const ConfigBlock& block : kConfigBlocks) {
    blocks[block.name] = block.is_optional ? Json() : Json::object();
  }
  const bool divides = !settings.keep_layer_shares.empty() || !settings.keep_heads.empty();
  const ConfigPolicy* policy =
      policy_of(settings.keeper == "observed" && divides ? "compresskv"
                                                         : file_word("keeper", settings.keeper));
  if (policy != nullptr) blocks["retention"] = {{"policy", policy->policy}};
  if (settings.grouping == "clusters") blocks["clusters"] = Json::object();
  if (settings.audit_every > 0 || settings.missed_mass_max) blocks["audit"] = Json::object();
  visit_settings([&](const char* name, auto member, const auto&) {
    const ConfigPath* path = config_path(name);
    if (path == nullptr || blocks[path->block].is_null()) return;
    const bool is_policy = std::string_view(path->block) == "retention";
    if (is_policy && !has_field(*policy, path->field)) return;
    Json value = to_json(settings.*member);
    if (*path->words != '\0') {
      value = file_word(name, value.is_string() ? value.get<std::string>() : value.dump());
    }
    blocks[path->block][path->field] = value;
  });
  Json& audit = blocks["audit"];
  if (audit.is_object() && settings.audit_every == 0) audit["interval"] = kAuditInterval;
  return blocks;
}

Json with_changes(const Json& fields, const Json& changes) {
  Json made = fields;
  if (find_field(changes, "summary.kind") != nullptr) forget_default_score(made);
  for (const ConfigBlock& block : kConfigBlocks) {
    if (const Json* change = find_field(changes, block.name)) made[block.name] = *change;
  }
  const auto has_policy = [&] {
    return made.contains("retention") && made["retention"].is_object();
  };
  if (const Json* policy = find_field(changes, kPolicyPath)) {
    const Json* had = has_policy() ? find_field(made["retention"], "policy") : nullptr;
    if (had == nullptr || *had != *policy) made["retention"] = {{"policy", *policy}};
  }
  for (const auto& [path, value] : changes.items()) {
    const size_t middle = path.find('.');
    if (middle == path.npos || path == kPolicyPath) continue;
    const std::string block = path.substr(0, middle);
    if (block == "retention" && !has_policy()) {
      throw ConfigError(path + ": must come with retention.policy (one of " + policies() +
                        "), since nothing is retained, got " + shown(value));
    }
    if (!made.contains(block) || made[block].is_null()) made[block] = Json::object();
    // A block that is none is refused where blocks are read.
    if (made[block].is_object()) made[block][path.substr(middle + 1)] = value;
  }
  return made;
}

}  // namespace kvswap

#endif
