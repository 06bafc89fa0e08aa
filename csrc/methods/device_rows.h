#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "device/device.h"
#include "device/table_ring.h"
#include "methods/rows.h"

namespace kvswap {

/// Rows on a device: queues the kernels that make them and that ask them, on the current stream.
/// What they score is the same for all: a row's score is its product with what asks.
class DeviceRows {
 public:
  virtual ~DeviceRows() = default;
  /// Makes new rows of a layer: all pieces have the same strides and dtype. Their tables take at
  /// most append_table_bytes().
  virtual void write(int64_t layer, std::span<const RowPiece> pieces, TableRing& tables) = 0;
  /// asked: [batch, queries, width] fp32, by mass [batch, queries, heads, width].
  virtual void ask(const ChooseArgs& args, int64_t batch, float* asked) = 0;

  /// Bytes of the tables of one write() to so many groups.
  static int64_t append_table_bytes(const MethodOptions& options, int64_t groups);
};

/// For lines of the registry; `rows` outlives it.
std::unique_ptr<DeviceRows> low_rank_on_device(Device& device, const MethodOptions& options,
                                               const Rows& rows);
std::unique_ptr<DeviceRows> box_on_device(Device& device, const MethodOptions& options,
                                          const Rows& rows);
std::unique_ptr<DeviceRows> mean_on_device(Device& device, const MethodOptions& options,
                                           const Rows& rows);

/// How rows stand on a device, in chunks.
struct RowLayout {
  explicit RowLayout(const MethodOptions& options);
  int64_t chunks(int64_t groups) const;
  int64_t rows(int64_t groups) const { return groups * rows_a_group; }

  int64_t tokens_a_row = 1;
  int64_t rows_a_group = 1;
  int64_t chunk = 0;  // rows
};

}  // namespace kvswap
