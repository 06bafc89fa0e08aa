// Settings that clusters of similar keys live under, each by its name.
#pragma once

#include <ostream>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cluster_run.h"
#include "how_long.h"

namespace kvswap {

// What several of them have.
inline EngineOptions each_head(EngineOptions options) {
  options.heads = "each";
  options.head_dim *= 2;
  return options;
}
inline EngineOptions without_reuse(EngineOptions options) {
  options.replacement = "none";
  options.pages_max = 8;
  return options;
}
inline EngineOptions in_pools(EngineOptions options) {
  options.layout = "pools";
  return options;
}
inline EngineOptions in_narrow_pools(EngineOptions options) {
  options.layout = "pools";
  options.pool_slack_pages = 0;
  options.cluster_tokens_max = 24;
  options.split_factor = 0.5;
  options.merge_gap_bytes = 0;
  return options;
}
inline EngineOptions with_room_for_all(EngineOptions options) {
  options.groups_max = options.pages_max = 400;
  return options;
}
inline EngineOptions updated(EngineOptions options, const char* update) {
  options.cluster_update = update;
  // Local ones have no use for another number.
  if (options.cluster_update == "local") options.pending_tokens = EngineOptions{}.pending_tokens;
  return options;
}
/// Records a quarter as large in the file, of fp32, which are at least half a block there.
inline EngineOptions in_float8(EngineOptions options) {
  options.records = "fp8";
  options.head_dim *= 4;
  return options;
}

struct ClusterLife {
  const char* name;
  EngineOptions (*adapt)(EngineOptions);
};
inline void PrintTo(const ClusterLife& life, std::ostream* stream) { *stream << life.name; }
inline constexpr ClusterLife kClusterLives[] = {
    {"usual", [](EngineOptions options) { return options; }},
    {"each_head", each_head},
    {"mass",
     [](EngineOptions options) {
       options.cluster_score = "mass";
       return options;
     }},
    {"max",
     [](EngineOptions options) {
       options.cluster_score = "max";
       return options;
     }},
    {"bfloat16",
     [](EngineOptions options) {
       options.dtype = DType::kBFloat16;
       options.head_dim *= 2;
       options.cluster_score = "max_mass";
       return options;
     }},
    {"nothing_waits",
     [](EngineOptions options) {
       options.pending_tokens = 0;
       return options;
     }},
    {"no_reuse", without_reuse},
    {"shared_pages",
     [](EngineOptions options) {
       options.layers = 3;
       options.resident_layers = 2;
       return options;
     }},
    {"score",
     [](EngineOptions options) {
       options.replacement = "score";
       return options;
     }},
    {"many_splits",
     [](EngineOptions options) {
       options.replacement = "clusters";
       options.split_factor = 0.2;
       return options;
     }},
    {"pools", in_pools},
    {"narrow_pools", in_narrow_pools},
    {"each_head_in_narrow_pools",
     [](EngineOptions options) { return in_narrow_pools(each_head(options)); }},
    {"room_for_all", with_room_for_all},
    {"room_for_all_in_pools",
     [](EngineOptions options) { return in_pools(with_room_for_all(options)); }},
    {"static", [](EngineOptions options) { return updated(options, "static"); }},
    {"static_in_pools",
     [](EngineOptions options) { return in_narrow_pools(updated(options, "static")); }},
    {"local", [](EngineOptions options) { return updated(options, "local"); }},
    {"local_each_head_in_pools",
     [](EngineOptions options) { return in_pools(each_head(updated(options, "local"))); }},
    {"float8", in_float8},
    {"float8_each_head_in_narrow_pools",
     [](EngineOptions options) {
       options.dtype = DType::kBFloat16;
       return in_float8(in_narrow_pools(each_head(options)));
     }},
    {"float8_local_without_reuse",
     [](EngineOptions options) { return in_float8(without_reuse(updated(options, "local"))); }},
};

/// Those of `make test`: each setting of one that is left out stands in another.
inline std::vector<ClusterLife> cluster_lives() {
  const std::set<std::string_view> left_out = {"each_head",    "max",   "no_reuse",
                                               "narrow_pools", "pools", "room_for_all_in_pools",
                                               "static",       "local", "float8"};
  std::vector<ClusterLife> chosen;
  for (const ClusterLife& life : kClusterLives) {
    if (is_long() || !left_out.contains(life.name)) chosen.push_back(life);
  }
  return chosen;
}

class ClusterLives : public testing::TestWithParam<ClusterLife> {
 protected:
  EngineOptions options(int64_t group_tokens = 4) {
    return GetParam().adapt(cluster_options(directory_.path(), group_tokens));
  }
  const TestDirectory directory_;
};

}  // namespace kvswap
