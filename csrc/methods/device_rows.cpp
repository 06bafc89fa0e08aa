#include "methods/device_rows.h"

namespace kvswap {

RowLayout::RowLayout(const MethodOptions& options) {
  const RowsKind* kind = RowsKind::find(options.rows);
  KVSWAP_ASSERT(kind != nullptr);
  tokens_a_row = kind->takes_projections ? 1 : kind->shape(options, 0).tokens_per_row;
  rows_a_group = options.group_tokens / tokens_a_row;
  chunk = chunk_rows(options.group_tokens, tokens_a_row);
}

int64_t RowLayout::chunks(int64_t groups) const { return (rows(groups) + chunk - 1) / chunk; }

int64_t DeviceRows::append_table_bytes(const MethodOptions& options, int64_t groups) {
  const int64_t pieces = RowLayout(options).chunks(groups) + 1;
  if (RowsKind::find(options.rows)->takes_projections) {
    return TableRing::padded(pieces * int64_t{sizeof(cuda::ProjectPiece)});
  }
  return TableRing::padded(pieces * int64_t{sizeof(cuda::GroupPiece)}) +
         TableRing::padded(groups * int64_t{sizeof(uint64_t)});
}

}  // namespace kvswap
