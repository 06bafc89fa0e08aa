// A block of the past on another device, unpacked in torch's operations, is what the host decodes.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/record_codec.h"
#include "torch/prefix_tensors.h"

namespace kvswap {
namespace {

/// Groups of e4m3 as a stream lists them, one a sink that stands elsewhere.
void expect_as_the_host_decodes(DType dtype, at::ScalarType type, const std::string& records) {
  EngineOptions options;
  options.kv_heads = 2;
  options.group_tokens = 4;
  options.head_dim = 8;
  options.dtype = dtype;
  options.records = records;
  const RecordShape shape = options.record_shape();
  constexpr int64_t kGroups = 5;
  constexpr int64_t kSink = 3;
  const int64_t record_bytes = options.payload_bytes() + 32;  // padded
  at::manual_seed(3);
  at::Tensor pages = (at::randn({kGroups, shape.payload_bytes() / shape.element_bytes}) *
                      at::logspace(-4, 4, kGroups, 2).view({-1, 1}))
                         .to(type);
  pages[1][7] = std::numeric_limits<float>::quiet_NaN();
  std::vector<std::byte> stored(kGroups * record_bytes, std::byte{0x55});
  PrefixPages listed;
  listed.exponents.resize(kGroups * options.note_bytes());
  at::Tensor expected = pages.clone();
  for (int64_t i = 0; i < kGroups; ++i) {
    std::byte* record = stored.data() + i * record_bytes;
    listed.pages.push_back(record);
    const void* from = pages[i].data_ptr();
    void* to = record;
    if (records == "model") {
      std::memcpy(to, from, shape.payload_bytes());
      continue;
    }
    int8_t* exponents = listed.exponents.data() + i * options.note_bytes();
    encode_records({shape, dtype, &from, &to, exponents, 1}, {});
    from = record;
    to = expected[i].data_ptr();
    decode_records({shape, dtype, &from, &to, exponents, 1}, {});
  }
  if (records == "fp8") {
    expected[kSink].copy_(pages[kSink]);
    listed.pages[kSink] = static_cast<const std::byte*>(pages[kSink].data_ptr());
    std::fill_n(listed.exponents.begin() + kSink * options.note_bytes(), options.note_bytes(),
                kNotFloat8);
  }
  const PrefixStream::Block block = {
      .first_group = 0, .groups = kGroups, .records = stored.data(), .listed = &listed};
  const auto [keys, values] =
      unpack_there(Plan(options, record_bytes), block, at::TensorOptions().dtype(type));
  const auto [expected_keys, expected_values] = split_pages(options, expected);
  EXPECT_EQ(keys.sizes(), (at::IntArrayRef{2, kGroups * 4, 8}));
  EXPECT_TRUE(at::allclose(keys, expected_keys, 0, 0, true));
  EXPECT_TRUE(at::allclose(values, expected_values, 0, 0, true));
}

TEST(PastTensors, AreWhatTheHostDecodes) {
  for (const std::string records : {"model", "fp8"}) {
    expect_as_the_host_decodes(DType::kFloat32, at::kFloat, records);
    expect_as_the_host_decodes(DType::kBFloat16, at::kBFloat16, records);
    expect_as_the_host_decodes(DType::kFloat16, at::kHalf, records);
  }
}

}  // namespace
}  // namespace kvswap
