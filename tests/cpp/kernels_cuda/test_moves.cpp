#include "kernels/cuda/kernels.h"
#include "kernels_cuda/device_test.h"

namespace kvswap {
namespace {

std::vector<uint16_t> counted(int64_t count, uint32_t seed) {
  std::vector<uint16_t> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<uint16_t>(i * 40503 + seed);
  return values;
}

struct GatherShape {
  int64_t batch, page_heads, table_heads, pages, group_tokens, head_dim;
};

void expect_gather_as_on_cpu(const GatherShape& s) {
  PagedGatherArgs args;
  args.pages_max = s.pages;
  args.table_heads = s.table_heads;
  args.batch = s.batch;
  args.shape = {s.page_heads, s.group_tokens, s.head_dim, 2};
  const int64_t page = args.shape.payload_bytes() / 2;
  const int64_t tokens = s.batch * args.kv_heads() * s.pages * s.group_tokens * s.head_dim;
  GuardedBuffer<uint16_t> pool(counted(5 * page, 1));
  GuardedBuffer<const void*> table(s.batch * s.table_heads * s.pages);
  for (int64_t i = 0; i < table.size(); ++i) {
    table[i] = i % 6 == 3 ? nullptr : pool.data() + i * 7 % 5 * page;
  }
  args.pages = table.data();
  std::vector<uint16_t> expected_keys(tokens), expected_values(tokens);
  args.keys = expected_keys.data();
  args.values = expected_values.data();
  paged_gather(args, {});
  in_every_order([&] {
    GuardedBuffer<uint16_t> keys(tokens), values(tokens);
    args.keys = keys.data();
    args.values = values.data();
    expect_ok(cuda::paged_gather(args, nullptr));
    EXPECT_EQ(keys.copy(), expected_keys);
    EXPECT_EQ(values.copy(), expected_values);
  });
}

TEST(CudaPagedGather, AsOnCpu) {
  expect_gather_as_on_cpu({2, 3, 1, 9, 4, 64});
  expect_gather_as_on_cpu({2, 3, 3, 9, 4, 96});
  expect_gather_as_on_cpu({1, 1, 3, 5, 16, 128});
  expect_gather_as_on_cpu({3, 2, 1, 4, 7, 5});  // no 16-byte moves
  expect_gather_as_on_cpu({1, 2, 1, 3, 64, 256});
  expect_gather_as_on_cpu({0, 2, 1, 3, 4, 64});
  expect_gather_as_on_cpu({2, 2, 1, 0, 4, 64});
}

struct TransferShape {
  int64_t batch, kv_heads, tokens, group_tokens, head_dim;
  bool is_nhd;
};

/// Packs with slots and lengths on both sides, unpacks, and compares with the CPU's records.
void expect_transfer_as_on_cpu(const TransferShape& s) {
  const RecordShape shape{s.kv_heads, s.group_tokens, s.head_dim, 2};
  const int64_t batch_stride = s.kv_heads * s.tokens * s.head_dim;
  const int64_t head_stride = s.is_nhd ? s.head_dim : s.tokens * s.head_dim;
  const int64_t token_stride = s.is_nhd ? s.kv_heads * s.head_dim : s.head_dim;
  GuardedBuffer<uint16_t> keys(counted(s.batch * batch_stride, 1));
  GuardedBuffer<uint16_t> values(counted(s.batch * batch_stride, 2));
  const int64_t groups = (s.tokens + s.group_tokens - 1) / s.group_tokens;
  const int64_t count = s.batch * groups;
  const int64_t record = shape.payload_bytes() / 2;
  std::vector<uint16_t> expected(count * record, 9);
  GuardedBuffer<int32_t> sequences(count), slots(count), lengths(count);
  GuardedBuffer<int64_t> first_tokens(count);
  GuardedBuffer<void*> targets(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = i % groups * s.group_tokens;
    const int64_t slot = first == 0 ? s.group_tokens / 2 : 0;  // a tail that begins in a group
    sequences[i] = static_cast<int32_t>(i / groups);
    first_tokens[i] = first;
    slots[i] = static_cast<int32_t>(slot);
    lengths[i] = static_cast<int32_t>(std::min(s.group_tokens - slot, s.tokens - first));
    void* target = expected.data() + i * record;
    pack_records({.shape = shape,
                  .tokens = {.keys = keys.data() + sequences[i] * batch_stride,
                             .values = values.data() + sequences[i] * batch_stride,
                             .key_head_stride = head_stride,
                             .key_token_stride = token_stride,
                             .value_head_stride = head_stride,
                             .value_token_stride = token_stride},
                  .records = &target,
                  .first_tokens = &first_tokens[i],
                  .slots = &slots[i],
                  .lengths = &lengths[i],
                  .count = 1});
  }
  in_every_order([&] {
    GuardedBuffer<uint16_t> records(std::vector<uint16_t>(count * record, 9));
    for (int64_t i = 0; i < count; ++i) targets[i] = records.data() + i * record;
    cuda::BatchTransferArgs args{.shape = shape,
                                 .tokens = {.keys = keys.data(),
                                            .values = values.data(),
                                            .key_head_stride = head_stride,
                                            .key_token_stride = token_stride,
                                            .value_head_stride = head_stride,
                                            .value_token_stride = token_stride},
                                 .key_batch_stride = batch_stride,
                                 .value_batch_stride = batch_stride,
                                 .records = targets.data(),
                                 .sequences = sequences.data(),
                                 .first_tokens = first_tokens.data(),
                                 .slots = slots.data(),
                                 .lengths = lengths.data(),
                                 .count = count};
    expect_ok(cuda::pack_records(args, nullptr));
    ASSERT_EQ(records.copy(), expected);
    // Back into empty tensors: what was packed is there, and no more.
    GuardedBuffer<uint16_t> back(std::vector<uint16_t>(s.batch * batch_stride, 0));
    GuardedBuffer<uint16_t> back_values(std::vector<uint16_t>(s.batch * batch_stride, 0));
    args.tokens.keys = back.data();
    args.tokens.values = back_values.data();
    expect_ok(cuda::unpack_records(args, nullptr));
    int64_t moved = 0;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t t = first_tokens[i]; t < first_tokens[i] + lengths[i]; ++t) {
        for (int64_t h = 0; h < s.kv_heads; ++h) {
          for (int64_t d = 0; d < s.head_dim; ++d, ++moved) {
            const int64_t at = sequences[i] * batch_stride + h * head_stride + t * token_stride + d;
            ASSERT_EQ(back[at], keys[at]);
            ASSERT_EQ(back_values[at], values[at]);
            back[at] = back_values[at] = 0;
          }
        }
      }
    }
    EXPECT_EQ(back.copy(), std::vector<uint16_t>(s.batch * batch_stride, 0));
    EXPECT_EQ(back_values.copy(), std::vector<uint16_t>(s.batch * batch_stride, 0));
  });
}

TEST(CudaTransfer, AsOnCpu) {
  for (const bool is_nhd : {false, true}) {
    expect_transfer_as_on_cpu({2, 3, 13, 4, 64, is_nhd});
    expect_transfer_as_on_cpu({1, 2, 70, 32, 128, is_nhd});
    expect_transfer_as_on_cpu({3, 1, 5, 1, 96, is_nhd});
    expect_transfer_as_on_cpu({2, 2, 9, 4, 7, is_nhd});  // no 16-byte moves
    expect_transfer_as_on_cpu({1, 2, 0, 4, 64, is_nhd});
  }
}

void expect_copies(int64_t count, int64_t bytes, bool has_offsets) {
  GuardedBuffer<uint8_t> staging(count * (bytes + 16));
  for (int64_t i = 0; i < staging.size(); ++i) staging[i] = static_cast<uint8_t>(i * 31 + i / 251);
  const int64_t stride = has_offsets ? 0 : bytes;
  GuardedBuffer<int64_t> offsets(count);
  for (int64_t i = 0; i < count; ++i) offsets[i] = (count - 1 - i) * (bytes + 16);
  in_every_order([&] {
    GuardedBuffer<uint8_t> pages(count * bytes);
    GuardedBuffer<void*> targets(count);
    for (int64_t i = 0; i < count; ++i) targets[i] = pages.data() + (i + 1) % count * bytes;
    expect_ok(cuda::copy_records({.source = staging.data(),
                                  .source_stride = stride,
                                  .source_offsets = has_offsets ? offsets.data() : nullptr,
                                  .targets = targets.data(),
                                  .count = count,
                                  .bytes = bytes},
                                 nullptr));
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* source = staging.data() + (has_offsets ? offsets[i] : i * stride);
      ASSERT_EQ(std::memcmp(targets[i], source, bytes), 0) << i << " of " << bytes;
    }
  });
}

/// Where KV heads are sequences of their own, record i is of head i % 3 of tensor i / 3.
TEST(CudaTransfer, OfHeadsApartIsThatOfATensorEach) {
  const int64_t batch = 2, heads = 3, tokens = 8, dim = 64;
  const RecordShape shape{1, 4, dim, 2};
  const int64_t record = shape.payload_bytes() / 2;
  for (const bool is_nhd : {false, true}) {
    const int64_t head_stride = is_nhd ? dim : tokens * dim;
    const int64_t token_stride = is_nhd ? heads * dim : dim;
    const int64_t batch_stride = heads * tokens * dim;
    GuardedBuffer<uint16_t> keys(counted(batch * batch_stride, 1));
    GuardedBuffer<uint16_t> values(counted(batch * batch_stride, 2));
    GuardedBuffer<int32_t> sequences(batch * heads);
    GuardedBuffer<int64_t> first_tokens(batch * heads);
    GuardedBuffer<void*> targets(batch * heads);
    std::vector<uint16_t> expected(batch * heads * record);
    for (int64_t i = 0; i < batch * heads; ++i) {
      sequences[i] = static_cast<int32_t>(i);
      first_tokens[i] = i % 5;
      for (int64_t at = 0; at < 4 * dim; ++at) {
        const int64_t from = i / heads * batch_stride + i % heads * head_stride +
                             (first_tokens[i] + at / dim) * token_stride + at % dim;
        expected[i * record + at] = keys[from];
        expected[i * record + 4 * dim + at] = values[from];
      }
    }
    in_every_order([&] {
      GuardedBuffer<uint16_t> records(std::vector<uint16_t>(expected.size(), 9));
      for (int64_t i = 0; i < batch * heads; ++i) targets[i] = records.data() + i * record;
      expect_ok(cuda::pack_records({.shape = shape,
                                    .tokens = {.keys = keys.data(),
                                               .values = values.data(),
                                               .key_head_stride = head_stride,
                                               .key_token_stride = token_stride,
                                               .value_head_stride = head_stride,
                                               .value_token_stride = token_stride},
                                    .key_batch_stride = batch_stride,
                                    .value_batch_stride = batch_stride,
                                    .records = targets.data(),
                                    .sequences = sequences.data(),
                                    .first_tokens = first_tokens.data(),
                                    .count = batch * heads,
                                    .heads_apart = heads},
                                   nullptr));
      ASSERT_EQ(records.copy(), expected);
    });
  }
}

TEST(CudaCopyRecords, AnySize) {
  for (const int64_t bytes : {16, 1024, 4096, 4112, 12288, 20480, 3}) {
    expect_copies(1, bytes, false);
    expect_copies(11, bytes, false);
  }
  for (const int64_t bytes : {16, 4096, 12288}) expect_copies(9, bytes, true);
  expect_copies(0, 16, false);
}

}  // namespace
}  // namespace kvswap
