#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "store/checksum.h"

namespace kvswap {
namespace {

TEST(Checksum, OfPiecesIsThatOfTheWhole) {
  std::vector<std::byte> bytes(70001);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 31 + i / 257);
  for (const size_t size : {0ul, 1ul, 7ul, 8ul, 9ul, 240ul, 241ul, 4096ul, 70001ul}) {
    const std::span<const std::byte> whole(bytes.data(), size);
    for (const size_t piece : {1ul, 3ul, 8ul, 1000ul, 70001ul}) {
      RunningChecksum sum(size);
      for (size_t at = 0; at < size; at += piece) {
        sum.add(whole.subspan(at, std::min(piece, size - at)));
      }
      EXPECT_EQ(sum.value(), checksum_of(whole)) << size << " by " << piece;
    }
  }
}

}  // namespace
}  // namespace kvswap
