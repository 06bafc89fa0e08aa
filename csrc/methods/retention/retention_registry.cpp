#include <algorithm>
#include <array>

#include "methods/retention/arkv.h"
#include "methods/retention/cake.h"
#include "methods/retention/h2o.h"
#include "methods/retention/key_outliers.h"
#include "methods/retention/recent_only.h"
#include "methods/retention/snapkv.h"
#include "methods/retention/user_retention.h"

namespace kvswap {
namespace {

/// A policy is one file of this folder and a line here.
constexpr std::array kKinds = {
    &kNoRetention, &kRecentOnly, &SnapKv::kKind,      &H2o::kKind,
    &Arkv::kKind,  &Cake::kKind, &KeyOutliers::kKind, &UserRetention::kKind,
};

}  // namespace

std::span<const RetentionKind* const> RetentionKind::all() { return kKinds; }

const RetentionKind* RetentionKind::find(const std::string& name) {
  const auto found = std::find_if(kKinds.begin(), kKinds.end(),
                                  [&](const RetentionKind* kind) { return name == kind->name; });
  return found == kKinds.end() ? nullptr : *found;
}

}  // namespace kvswap
