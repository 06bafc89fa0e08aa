#pragma once

#include <cstdint>
#include <memory>

#include "methods/summary/summary_encoder.h"

namespace kvswap {

/// Nothing stays in memory of the keys: a layer never chooses, and attends everything.
class NullEncoder final : public SummaryEncoder {
 public:
  static SummaryShape shape_of(const MethodOptions& options, int64_t) {
    return {.width = 0, .tokens_per_row = options.group_tokens};
  }
  static std::unique_ptr<SummaryEncoder> make(const MethodOptions& options,
                                              const std::shared_ptr<class SummaryMemory>&) {
    return std::make_unique<NullEncoder>(options);
  }

  explicit NullEncoder(const MethodOptions& options) : options_(options) {}
  SummaryShape shape(int64_t layer) const override { return shape_of(options_, layer); }
  bool is_ready(int64_t) const override { return false; }
  void write(int64_t, const SummarySlice&) const override { KVSWAP_ASSERT(false); }
  void ask(int64_t, const QueryView&, int64_t, float*) const override { KVSWAP_ASSERT(false); }

 private:
  MethodOptions options_;
};

}  // namespace kvswap
