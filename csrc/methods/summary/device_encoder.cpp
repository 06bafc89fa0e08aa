#include "methods/summary/device_encoder.h"

namespace kvswap {

RowLayout::RowLayout(const SummaryKind& kind, const MethodOptions& options)
    : tokens_a_row(kind.takes_projections ? 1 : kind.shape(options, 0).tokens_per_row),
      rows_a_group(options.group_tokens / tokens_a_row),
      chunk(chunk_rows(options.group_tokens, tokens_a_row)) {}

int64_t RowLayout::chunks(int64_t groups) const { return (rows(groups) + chunk - 1) / chunk; }

}  // namespace kvswap
