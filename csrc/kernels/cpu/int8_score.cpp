#include "kernels/int8_score.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/element.h"

namespace kvswap {

/// As products of floats, which hold sums of such numbers exactly.
void int8_score(const Int8ScoreArgs& args) {
  const int64_t stride = int8_stride(args.rank);
  thread_local std::vector<float> query;  // [queries, rank]
  query.resize(args.queries * args.rank);
  for (int64_t q = 0; q < args.queries; ++q) {
    std::copy_n(args.query + q * stride, args.rank, query.data() + q * args.rank);
  }
  low_rank_score({.summary = args.summary,
                  .token_scale = args.token_scale,
                  .query = query.data(),
                  .scores = args.scores,
                  .score_stride = args.score_stride,
                  .blocks = args.blocks,
                  .rank = args.rank,
                  .queries = args.queries,
                  .dtype = DType::kInt8});
}

void quantize_queries(const QuantizeQueriesArgs& args) {
  const int64_t stride = int8_stride(args.rank);
  for (int64_t q = 0; q < args.queries; ++q) {
    const float* source = args.query + q * args.rank;
    int8_t* target = args.quantized + q * stride;
    float limit = 0.0f;
    bool is_number = true;
    for (int64_t r = 0; r < args.rank; ++r) {
      limit = std::max(limit, std::fabs(source[r]));
      is_number = is_number && std::isfinite(source[r]);
    }
    args.scales[q] = is_number ? level_scale(limit, 127.0f) : NAN;
    const float inverse = is_number && args.scales[q] > 0.0f ? 1.0f / args.scales[q] : 0.0f;
    for (int64_t r = 0; r < stride; ++r) {
      const float level = is_number && r < args.rank ? std::nearbyint(source[r] * inverse) : 0.0f;
      target[r] = static_cast<int8_t>(std::clamp(level, -127.0f, 127.0f));
    }
  }
}

}  // namespace kvswap
