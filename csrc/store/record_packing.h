#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace kvswap {

/// How a record stands in the file where it takes fewer bytes there than in memory. Packing what
/// was unpacked may round again, unless the kind says otherwise: a record is packed once, and
/// copied as it stands. Thread-safe.
class RecordPacking {
 public:
  virtual ~RecordPacking() = default;
  /// Of a packed record, without its padding.
  virtual int64_t payload_bytes() const = 0;
  /// To [payload_bytes()]; the two do not overlap, nor do those of unpack().
  virtual void pack(const std::byte* record, std::byte* packed) const = 0;
  virtual void unpack(const std::byte* packed, std::byte* record) const = 0;
};

/// What a record is in memory and in the file, padding included.
struct RecordForm {
  int64_t record_bytes = 0;
  int64_t stored_bytes = 0;
  std::shared_ptr<const RecordPacking> packing = nullptr;  // null: the two are the same
};

}  // namespace kvswap
