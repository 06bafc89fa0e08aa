#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvswap/exact_attention.h"

namespace kvswap {

/// What a part attends of a chunk, in memory of the host.
struct PartView {
  QueryView query;               // of the part alone: sequence 0
  KeyValueView own;              // likewise
  int64_t position = 0;          // of the first token
  const float* sinks = nullptr;  // [heads]
  std::byte* output = nullptr;   // [tokens, ...] of the cache's dtype
  int64_t output_stride = 0;     // elements from token to token
};

/// A part in memory of the host, and what it has attended so far in fp32.
class HostPart : public ExactPart {
 public:
  HostPart(const Engine& engine, int64_t part, const PartView& view, const AttendArgs& args);

  Status visit_newest(int64_t begin, int64_t end, const std::byte* keys,
                      const std::byte* values) override;
  void add_sinks() override;
  KeptTokens::Window window(int64_t most) const override;
  void write() override;

 protected:
  /// Tokens at positions [begin, end) of the part: sequence 0 of the view.
  virtual void attend_tokens(int64_t begin, int64_t end, const KeyValueView& tokens) = 0;

  const EngineOptions& options() const { return options_; }
  const TokenValidity& validity() const { return validity_; }
  const PartView& view() const { return view_; }
  const QueryView& query() const { return view_.query; }
  const Execution& execution() const { return execution_; }
  float scale() const { return scale_; }
  float softcap() const { return softcap_; }
  float* output() { return output_.data(); }            // [tokens, heads, head_dim]
  float* log_sum_exp() { return log_sum_exp_.data(); }  // [tokens, heads]

 private:
  const EngineOptions& options_;
  const TokenValidity& validity_;
  const PartView view_;
  const float scale_;
  const float softcap_;
  const Execution execution_;
  std::vector<float> output_;
  std::vector<float> log_sum_exp_;
};

/// By the paged kernel, 16 queries at a time: any dtype, any machine.
std::unique_ptr<ExactPart> paged_part(const Engine& engine, int64_t part, const PartView& view,
                                      const AttendArgs& args);

/// By chunk_attention(), where takes_chunk_parts(): bf16 on CPUs that multiply it.
std::unique_ptr<ExactPart> chunk_part(const Engine& engine, int64_t part, const PartView& view,
                                      const AttendArgs& args);
bool takes_chunk_parts(const EngineOptions& options);
/// ExactChunk::attend_alone() for one part, a few hundred queries at a time.
void attend_chunk_alone(const Engine& engine, int64_t part, const PartView& view,
                        const AttendArgs& args);

}  // namespace kvswap
