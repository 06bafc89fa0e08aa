#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "methods/summary/summary_encoder.h"

namespace kvswap {

/// Nothing is kept of the keys here: before each choice somebody else says what the groups are
/// worth. Ties, sinks, padding, how many and who is in memory stay the engine's to decide.
/// Rows of no width: a layer has no summary.
class UserScoredEncoder final : public SummaryEncoder {
 public:
  static SummaryShape shape_of(const MethodOptions& options, int64_t) {
    return {.width = 0, .tokens_per_row = options.group_tokens};
  }
  static std::unique_ptr<SummaryEncoder> make(const MethodOptions& options,
                                              const std::shared_ptr<class SummaryMemory>&) {
    return std::make_unique<UserScoredEncoder>(options);
  }

  explicit UserScoredEncoder(const MethodOptions& options)
      : options_(options), given_(options.layers) {}
  SummaryShape shape(int64_t layer) const override { return shape_of(options_, layer); }
  void write(int64_t, const SummarySlice&) const override { KVSWAP_ASSERT(false); }
  void ask(int64_t, const QueryView&, int64_t, float*) const override { KVSWAP_ASSERT(false); }
  Status give(int64_t layer, const UserScores& scores) override;
  bool holds(int64_t layer, const UserScores& wanted) const override;
  void take(int64_t layer, std::span<float> scores) override;
  void forget() override { given_.assign(given_.size(), {}); }

 private:
  struct UserOverrides {
    int64_t sequences = 0;
    int64_t queries = 0;
    int64_t groups = 0;
    std::vector<float> scores;
  };

  MethodOptions options_;
  std::vector<UserOverrides> given_;  // [layers]
};

}  // namespace kvswap
