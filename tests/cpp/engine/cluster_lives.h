// Settings that clusters of similar keys live under, each by its name.
#pragma once

#include <array>
#include <ostream>
#include <string>

#include "cluster_run.h"

namespace kvswap {

inline EngineOptions as_it_is(EngineOptions options) { return options; }
inline EngineOptions each_head(EngineOptions options) {
  options.heads = "each";
  options.head_dim *= 2;
  return options;
}
inline EngineOptions by_mass(EngineOptions options) {
  options.cluster_score = "mass";
  return options;
}
inline EngineOptions by_best_head(EngineOptions options) {
  options.cluster_score = "max";
  return options;
}
inline EngineOptions in_halves(EngineOptions options) {
  options.dtype = DType::kBFloat16;
  options.head_dim *= 2;
  options.cluster_score = "max_mass";
  return options;
}
inline EngineOptions by_what_was_paid(EngineOptions options) {
  options.replacement = "score";
  return options;
}
inline EngineOptions nothing_waits(EngineOptions options) {
  options.pending_tokens = 0;
  return options;
}
inline EngineOptions without_reuse(EngineOptions options) {
  options.replacement = "none";
  options.pages_max = 8;
  return options;
}
inline EngineOptions sharing_pages(EngineOptions options) {
  options.layers = 3;
  options.resident_layers = 2;
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
inline EngineOptions many_splits(EngineOptions options) {
  options.replacement = "clusters";
  options.split_factor = 0.2;
  return options;
}
inline EngineOptions with_room_for_all(EngineOptions options) {
  options.groups_max = options.pages_max = 400;
  return options;
}
inline EngineOptions with_room_for_all_in_pools(EngineOptions options) {
  return in_pools(with_room_for_all(options));
}

inline EngineOptions static_ones(EngineOptions options) {
  options.cluster_update = "static";
  return options;
}
inline EngineOptions local_ones(EngineOptions options) {
  options.cluster_update = "local";
  options.pending_tokens = EngineOptions{}.pending_tokens;
  return options;
}
inline EngineOptions static_ones_in_pools(EngineOptions options) {
  return in_narrow_pools(static_ones(options));
}
inline EngineOptions local_ones_of_each_head_in_pools(EngineOptions options) {
  return in_pools(each_head(local_ones(options)));
}

struct ClusterLife {
  const char* name;
  EngineOptions (*adapt)(EngineOptions);
};
inline void PrintTo(const ClusterLife& life, std::ostream* stream) { *stream << life.name; }
inline constexpr std::array<ClusterLife, 18> kClusterLives = {{
    {"usual", as_it_is},
    {"each_head", each_head},
    {"mass", by_mass},
    {"max", by_best_head},
    {"bfloat16", in_halves},
    {"nothing_waits", nothing_waits},
    {"no_reuse", without_reuse},
    {"shared_pages", sharing_pages},
    {"score", by_what_was_paid},
    {"many_splits", many_splits},
    {"pools", in_pools},
    {"narrow_pools", in_narrow_pools},
    {"room_for_all", with_room_for_all},
    {"room_for_all_in_pools", with_room_for_all_in_pools},
    {"static", static_ones},
    {"static_in_pools", static_ones_in_pools},
    {"local", local_ones},
    {"local_each_head_in_pools", local_ones_of_each_head_in_pools},
}};

class ClusterLives : public testing::TestWithParam<ClusterLife> {
 protected:
  EngineOptions options(int64_t group_tokens = 4) {
    return GetParam().adapt(cluster_options(directory_.path(), group_tokens));
  }
  const TestDirectory directory_;
};

}  // namespace kvswap
