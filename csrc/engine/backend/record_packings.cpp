#include "engine/backend/record_packings.h"

#include "kernels/int4_records.h"
#include "kernels/record_rows.h"

namespace kvswap {

namespace {

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

class Float8TokenPacking final : public RecordPacking {
 public:
  Float8TokenPacking(const RecordShape& shape, DType dtype)
      : shape_(shape), dtype_(dtype), elements_(shape.payload_bytes() / shape.element_bytes) {}
  int64_t payload_bytes() const override {
    return elements_ + 2 * shape_.kv_heads * shape_.group_tokens;
  }
  void pack(const std::byte* record, std::byte* packed) const override {
    const void* from = record;
    void* to = packed;
    encode_record_rows(args(&from, &to, packed), {});
  }
  void unpack(const std::byte* packed, std::byte* record) const override {
    const void* from = packed;
    void* to = record;
    // Decoding writes none of them.
    decode_record_rows(args(&from, &to, const_cast<std::byte*>(packed)), {});
  }

 private:
  RecordCodecArgs args(const void* const* from, void* const* to, std::byte* packed) const {
    return {.shape = shape_,
            .dtype = dtype_,
            .from = from,
            .to = to,
            .exponents = reinterpret_cast<int8_t*>(packed + elements_),
            .count = 1};
  }

  RecordShape shape_;
  DType dtype_;
  int64_t elements_;
};

}  // namespace

std::unique_ptr<const RecordPacking> record_packing(const Settings& settings,
                                                    const RecordShape& shape, DType dtype) {
  if (settings.records == "int4") return std::make_unique<Int4Packing>(Int4Shape{shape, dtype});
  if (settings.records == "fp8" && settings.grouping == "clusters") {
    return std::make_unique<Float8TokenPacking>(shape, dtype);
  }
  return nullptr;
}

}  // namespace kvswap
