#pragma once

#include "kernels/int4_records.h"
#include "store/record_packing.h"

namespace kvswap {

/// storage.kv_dtype int4: four bits an element in the file, the model's dtype in memory.
class Int4Packing final : public RecordPacking {
 public:
  explicit Int4Packing(const Int4Shape& shape) : shape_(shape) {}
  int64_t payload_bytes() const override { return shape_.payload_bytes(); }
  void pack(const std::byte* record, std::byte* packed) const override {
    encode_int4_record(shape_, record, packed);
  }
  void unpack(const std::byte* packed, std::byte* record) const override {
    decode_int4_record(shape_, packed, record);
  }

 private:
  Int4Shape shape_;
};

}  // namespace kvswap
