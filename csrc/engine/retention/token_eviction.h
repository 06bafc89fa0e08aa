#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/engine_context.h"
#include "engine/retention/retained_pages.h"
#include "engine/sequence/batch.h"

namespace kvswap {

/// Tokens in memory whose records are discarded: sinks and retained tokens, in the model's dtype.
struct SurvivingTokens {
  int64_t count = 0;
  std::vector<int32_t> positions;  // [pages, group_tokens]
  std::vector<std::byte> pages;    // [pages, group_bytes]: token i in slot i % group_tokens
};

/// Discards records of a cache without a disk (EngineOptions::drops()), and lists what survives of
/// them in memory. With a disk no record is ever discarded. Not thread-safe.
class TokenEviction {
 public:
  TokenEviction(EngineContext& context, Batch& batch, RetainedPages& retained_pages)
      : context_(context), batch_(batch), retained_pages_(retained_pages) {}

  /// Discards the layer's records that no refresh reads (see RetentionManager), except those of its
  /// newest positions, which a crop may need.
  void discard_prefix(int64_t layer);
  /// What is left of a sequence's. Stands until the next call.
  const SurvivingTokens& left(int64_t layer, int64_t sequence);
  /// Scores of discarded tokens become -inf, so that none is selected. mass: [tokens].
  void mask_discarded(int64_t layer, int64_t sequence, std::span<float> mass) const;

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan);

 private:
  void add(const std::byte* page, int64_t slot, int64_t position);

  EngineContext& context_;
  Batch& batch_;
  RetainedPages& retained_pages_;
  SurvivingTokens left_;
};

}  // namespace kvswap
