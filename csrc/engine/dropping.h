#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/batch.h"
#include "engine/engine_parts.h"
#include "engine/kept_pages.h"

namespace kvswap {

/// Of the tokens whose records are gone, sinks and kept ones, in the model's dtype.
struct LeftTokens {
  int64_t count = 0;
  std::vector<int32_t> positions;  // [pages, group_tokens]
  std::vector<std::byte> pages;    // [pages, group_bytes]: token i in slot i % group_tokens
};

/// Where nothing is on disk (EngineOptions::drops()): which records are dropped for good, and what
/// is left of them. Elsewhere nothing is ever gone. Not thread-safe.
class Dropping {
 public:
  Dropping(EngineParts& parts, Batch& batch, KeptPages& kept_pages)
      : parts_(parts), batch_(batch), kept_pages_(kept_pages) {}

  /// Drops the layer's records that no turn will ask for (see Keeping), but for those of its newest
  /// positions, which a crop may.
  void drop_past(int64_t layer);
  /// What is left of a part's. Stands until the next call.
  const LeftTokens& left(int64_t layer, int64_t part);
  /// Tokens that are gone become worth -inf: they are nobody's choice. mass: [tokens].
  void forget_gone(int64_t layer, int64_t part, std::span<float> mass) const;

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan);

 private:
  void add(const std::byte* page, int64_t slot, int64_t position);

  EngineParts& parts_;
  Batch& batch_;
  KeptPages& kept_pages_;
  LeftTokens left_;
};

}  // namespace kvswap
