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
      RunningChecksum sum;
      for (size_t at = 0; at < size; at += piece) {
        sum.add(whole.subspan(at, std::min(piece, size - at)));
      }
      EXPECT_EQ(sum.value(), checksum_of(whole)) << size << " by " << piece;
    }
  }
}

// A saved cache of any build is read by every other: these are XXH3's own numbers.
TEST(Checksum, IsXxh3WhateverTheMachineHasInstalled) {
  EXPECT_STREQ(checksum_name(), "xxh3");
  EXPECT_EQ(checksum_of({}), 0x2d06800538d394c2u);
  const std::vector<std::byte> zeros(1024);
  EXPECT_EQ(checksum_of(zeros), 0xde5f15ab6daf7941u);
}

}  // namespace
}  // namespace kvswap
