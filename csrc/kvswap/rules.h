#pragma once

#include <cstdint>
#include <vector>

namespace kvswap {

// What a config's fields may be; settings_rules.h says which field follows which.

/// From low to high; null too where the field is optional.
struct IntRange {
  int64_t low;
  int64_t high;
};

struct Boolean {};

/// One of a few words; "None" stands for null.
struct OneOf {
  std::vector<const char*> words;
};

/// From 1 to high, one number or a list of them.
struct RankRange {
  int64_t high;
};

/// Numbers of layers, rising.
struct LayerNumbers {};

/// A file beside the config or in a folder below it; null: none.
struct FileName {};

}  // namespace kvswap
