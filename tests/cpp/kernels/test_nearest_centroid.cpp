#include <limits>
#include <numeric>

#include "kernels/kernel_test.h"
#include "kernels/nearest_centroid.h"

namespace kvswap {
namespace {

constexpr int64_t kKeyGap = 3;

struct Case {
  int64_t tokens, count, width;
};

/// Keys with a gap behind each, centroids side by side; some of both are the same.
struct Data {
  explicit Data(const Case& shape)
      : keys(random_elements<float>(shape.tokens * (shape.width + kKeyGap), 3)),
        rows(random_elements<float>(shape.count * shape.width, 4)),
        blocks((shape.count + 15) / 16 * 16 * shape.width, 1e9f),
        nearest(shape.tokens, -7),
        squared(shape.tokens, -7) {
    for (int64_t c = 0; c < shape.count; ++c) {
      for (int64_t d = 0; d < shape.width; ++d) {
        if (c % 5 == 4) rows[c * shape.width + d] = rows[(c - 2) * shape.width + d];
        blocks[(c / 16 * shape.width + d) * 16 + c % 16] = rows[c * shape.width + d];
      }
    }
  }

  NearestCentroidArgs args(const Case& shape) {
    return {.keys = keys.data(),
            .key_stride = shape.width + kKeyGap,
            .tokens = shape.tokens,
            .centroids = blocks.data(),
            .count = shape.count,
            .width = shape.width,
            .nearest = nearest.data(),
            .squared = squared.data()};
  }

  std::vector<float> keys, rows, blocks;
  std::vector<int32_t> nearest;
  std::vector<float> squared;
};

/// The contract's sum, one product after the other.
float plain_squared(const float* key, const Data& data, const Case& shape, int64_t centroid) {
  float sum = 0;
  for (int64_t d = 0; d < shape.width; ++d) {
    const volatile float apart = data.rows[centroid * shape.width + d] - key[d];
    const volatile float square = apart * apart;
    sum += square;
  }
  return sum;
}

int32_t plain_nearest(const float* key, const Data& data, const Case& shape,
                      const std::vector<uint8_t>& shut) {
  int32_t best = -1;
  float least = std::numeric_limits<float>::infinity();
  for (int64_t c = 0; c < shape.count; ++c) {
    const float sum = plain_squared(key, data, shape, c);
    if (!shut.empty() && shut[c]) continue;
    if (sum < least) {
      least = sum;
      best = static_cast<int32_t>(c);
    }
  }
  return best;
}

class NearestCentroid : public KernelTest {};

TEST_P(NearestCentroid, IsThePlainOneBitForBit) {
  for (const Case shape : {Case{1, 1, 1}, Case{7, 5, 3}, Case{9, 16, 8}, Case{33, 17, 64},
                           Case{64, 100, 31}, Case{5, 40, 130}}) {
    Data data(shape);
    const NearestCentroidArgs args = data.args(shape);
    nearest_centroid(args, {});
    for (int64_t i = 0; i < shape.tokens; ++i) {
      const float* key = args.keys + i * args.key_stride;
      EXPECT_EQ(data.nearest[i], plain_nearest(key, data, shape, {})) << i;
      EXPECT_NE(data.nearest[i] % 5, 4) << "its equal is lower";
      EXPECT_EQ(data.squared[i], plain_squared(key, data, shape, data.nearest[i]));
    }
  }
}

TEST_P(NearestCentroid, LooksAtNoneThatIsShutAndTakesKeysFromTheirRows) {
  const Case shape{12, 37, 9};
  Data data(shape);
  std::vector<uint8_t> shut(shape.count);
  for (int64_t c = 0; c < shape.count; ++c) shut[c] = c % 3 == 0;
  std::vector<int64_t> rows(shape.tokens);
  std::iota(rows.rbegin(), rows.rend(), 0);
  NearestCentroidArgs args = data.args(shape);
  args.shut = shut.data();
  args.tokens_at = rows.data();
  nearest_centroid(args, {});
  for (int64_t i = 0; i < shape.tokens; ++i) {
    const float* key = args.keys + rows[i] * args.key_stride;
    EXPECT_EQ(data.nearest[i], plain_nearest(key, data, shape, shut));
  }
  std::fill(shut.begin(), shut.end(), 1);
  nearest_centroid(args, {});
  EXPECT_EQ(data.nearest, std::vector<int32_t>(shape.tokens, -1));
}

TEST_P(NearestCentroid, HasNoneWhereNoDistanceIsANumber) {
  const Case shape{5, 3, 4};
  Data data(shape);
  NearestCentroidArgs args = data.args(shape);
  data.keys[0] = std::numeric_limits<float>::quiet_NaN();
  data.keys[args.key_stride] = -std::numeric_limits<float>::infinity();
  nearest_centroid(args, {});
  EXPECT_EQ(data.nearest[0], -1);
  EXPECT_EQ(data.nearest[1], -1);
  EXPECT_GE(data.nearest[2], 0);
  args.count = 0;
  nearest_centroid(args, {});
  EXPECT_EQ(data.nearest, std::vector<int32_t>(shape.tokens, -1));
}

KVSWAP_EVERY_LEVEL(NearestCentroid);

}  // namespace
}  // namespace kvswap
