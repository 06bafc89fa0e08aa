#include <numeric>

#include "kernels/kernel_test.h"
#include "kernels/records.h"

namespace kvswap {
namespace {

enum class Order { kHnd, kNhd };

struct Transfer {
  Transfer(const RecordShape& record_shape, int64_t token_count, Order order)
      : shape(record_shape), tokens(token_count) {
    const int64_t row = shape.kv_heads * tokens * shape.element_bytes;
    keys.resize(row * shape.head_dim);
    values.resize(row * shape.value_width());
    std::iota(keys.begin(), keys.end(), 1);
    std::iota(values.begin(), values.end(), 101);
    head_stride = order == Order::kHnd ? tokens : 1;
    token_stride = order == Order::kHnd ? 1 : shape.kv_heads;
  }

  TokenView view(std::vector<uint8_t>& k, std::vector<uint8_t>& v) const {
    return {.keys = k.data(),
            .values = v.data(),
            .key_head_stride = head_stride * shape.head_dim,
            .key_token_stride = token_stride * shape.head_dim,
            .value_head_stride = head_stride * shape.value_width(),
            .value_token_stride = token_stride * shape.value_width()};
  }

  /// Where byte 0 of (head, token) stands among rows of so many bytes.
  int64_t row(int64_t head, int64_t token, int64_t row_bytes) const {
    return (head * head_stride + token * token_stride) * row_bytes;
  }

  RecordShape shape;
  int64_t tokens;
  int64_t head_stride;  // in rows, as the next
  int64_t token_stride;
  std::vector<uint8_t> keys;
  std::vector<uint8_t> values;
};

void expect_round_trip(const RecordShape& shape, Order order) {
  const int64_t count = 3;
  const int64_t tokens = count * shape.group_tokens;
  Transfer transfer(shape, tokens, order);
  const int64_t key_bytes = shape.head_dim * shape.element_bytes;
  const int64_t value_bytes = shape.value_width() * shape.element_bytes;
  const int64_t head_bytes = shape.group_tokens * (key_bytes + value_bytes);
  EXPECT_EQ(shape.payload_bytes(), shape.kv_heads * head_bytes);
  std::vector<uint8_t> arena(count * shape.payload_bytes());
  std::vector<void*> records;
  std::vector<int64_t> first_tokens;
  for (int64_t i = 0; i < count; ++i) {
    records.push_back(arena.data() + (count - 1 - i) * shape.payload_bytes());
    first_tokens.push_back(i * shape.group_tokens);
  }
  TransferArgs args{.shape = shape,
                    .tokens = transfer.view(transfer.keys, transfer.values),
                    .records = records.data(),
                    .first_tokens = first_tokens.data(),
                    .slots = nullptr,
                    .lengths = nullptr,
                    .count = count};
  pack_records(args);
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    for (int64_t token = 0; token < tokens; ++token) {
      const auto* record = static_cast<const uint8_t*>(records[token / shape.group_tokens]);
      const int64_t slot = token % shape.group_tokens;
      const auto* key = record + head * head_bytes + slot * key_bytes;
      const auto* value =
          record + head * head_bytes + shape.group_tokens * key_bytes + slot * value_bytes;
      EXPECT_TRUE(
          std::equal(key, key + key_bytes, &transfer.keys[transfer.row(head, token, key_bytes)]));
      EXPECT_TRUE(std::equal(value, value + value_bytes,
                             &transfer.values[transfer.row(head, token, value_bytes)]));
    }
  }
  std::vector<uint8_t> keys(transfer.keys.size()), values(transfer.values.size());
  args.tokens = transfer.view(keys, values);
  unpack_records(args);
  EXPECT_EQ(keys, transfer.keys);
  EXPECT_EQ(values, transfer.values);
}

TEST(Records, RoundTrip) {
  for (const int64_t head_dim : {64, 72, 80, 128, 256}) {
    for (const int64_t group_tokens : {1, 4, 7, 32}) {
      for (const int64_t element_bytes : {2, 4}) {
        for (const int64_t value_dim : {int64_t{0}, head_dim, head_dim / 2 + 1, int64_t{1}}) {
          const RecordShape shape = {3, group_tokens, head_dim, element_bytes, 2, value_dim};
          expect_round_trip(shape, Order::kHnd);
          expect_round_trip(shape, Order::kNhd);
        }
      }
    }
  }
}

TEST(Records, SlotsAndLengthsMoveOnlyTheirTokens) {
  const RecordShape shape{2, 8, 64, 2, 2, 40};
  Transfer transfer(shape, 5, Order::kNhd);
  std::vector<uint8_t> record(shape.payload_bytes(), 0xee);
  void* base = record.data();
  const int64_t first_token = 2;
  const int32_t slot = 5;
  const int32_t length = 3;
  pack_records({.shape = shape,
                .tokens = transfer.view(transfer.keys, transfer.values),
                .records = &base,
                .first_tokens = &first_token,
                .slots = &slot,
                .lengths = &length,
                .count = 1});
  for (int64_t t = 0; t < shape.group_tokens; ++t) {
    const bool moved = t >= slot && t < slot + length;
    const int64_t token = first_token + t - slot;
    EXPECT_EQ(record[t * 128], moved ? transfer.keys[transfer.row(0, token, 128)] : 0xee) << t;
    const int64_t value = 8 * 128 + t * 80;  // of head 0, behind its keys
    EXPECT_EQ(record[value], moved ? transfer.values[transfer.row(0, token, 80)] : 0xee) << t;
  }
}

TEST(Records, NothingToMove) {
  pack_records({.shape = {2, 4, 64, 2}});
  unpack_records({.shape = {2, 4, 64, 2}});
}

}  // namespace
}  // namespace kvswap
