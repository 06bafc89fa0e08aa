#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "device/device.h"
#include "device/upload_ring.h"
#include "methods/summary/summary_encoder.h"

namespace kvswap {

/// Rows on a device: queues the kernels that make them and that ask them, on the current stream.
/// What they score is the same for all: a row's score is its product with what asks.
class DeviceEncoder {
 public:
  virtual ~DeviceEncoder() = default;
  /// Makes new rows of a layer: all pieces have the same strides and dtype. Their tables take at
  /// most DeviceEncoderKind::table_bytes().
  virtual void write(int64_t layer, std::span<const SummarySlice> pieces, UploadRing& tables) = 0;
  /// asked: [batch, queries, width] fp32, by mass [batch, queries, heads, width].
  virtual void ask(const ChooseArgs& args, int64_t batch, float* asked) = 0;
};

/// How rows stand on a device, in chunks.
struct RowLayout {
  RowLayout(const SummaryKind& kind, const MethodOptions& options);
  int64_t chunks(int64_t groups) const;
  /// Pieces of a sequence in one write() to so many groups, at most: the first may go on in a
  /// chunk.
  int64_t pieces(int64_t groups) const { return chunks(groups) + 1; }
  int64_t rows(int64_t groups) const { return groups * rows_a_group; }

  int64_t tokens_a_row = 1;
  int64_t rows_a_group = 1;
  int64_t chunk = 0;  // rows
};

/// A choice of DeviceEncoder, for a line of the registry.
struct DeviceEncoderKind {
  /// `rows` outlives it.
  std::unique_ptr<DeviceEncoder> (*make)(Device& device, const MethodOptions& options,
                                         const SummaryEncoder& rows);
  /// Bytes of the tables of one write() to so many groups of each of so many sequences.
  int64_t (*table_bytes)(const RowLayout& layout, int64_t sequences, int64_t groups);
};
extern const DeviceEncoderKind low_rank_on_device;
extern const DeviceEncoderKind box_on_device;
extern const DeviceEncoderKind mean_on_device;

}  // namespace kvswap
