#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>

#include "methods/selection/padding_mask.h"

namespace kvswap {
namespace {

void expect_equal(const PaddingMask& validity, const std::vector<bool>& model,
                  std::mt19937& random) {
  const auto positions = static_cast<int64_t>(model.size());
  ASSERT_EQ(validity.positions(), positions);
  ASSERT_EQ(validity.first_valid(), std::find(model.begin(), model.end(), true) - model.begin());
  int64_t from = positions;
  while (from > 0 && model[from - 1]) --from;
  ASSERT_EQ(validity.all_valid_from(), from);
  for (int64_t position = 0; position < positions; ++position) {
    ASSERT_EQ(validity.is_valid(position), model[position]);
  }
  for (int i = 0; i < 5; ++i) {
    const int64_t first = random() % (positions + 70);
    const int64_t count = 1 + random() % 64;
    uint64_t expected = 0;
    for (int64_t bit = 0; bit < count && first + bit < positions; ++bit) {
      expected |= uint64_t{model[first + bit]} << bit;
    }
    ASSERT_EQ(validity.mask(first, count), expected) << first << " + " << count;
  }
}

TEST(PaddingMask, EqualsAVectorOfBool) {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    PaddingMask validity;
    std::vector<bool> model;
    expect_equal(validity, model, random);
    for (int step = 0; step < 40; ++step) {
      if (random() % 4 > 0) {
        const int64_t count = random() % (random() % 3 == 0 ? 150 : 9);
        // All valid, all padding, or mixed; null means all valid.
        const uint32_t kind = random() % 4;
        const auto flags = std::make_unique<bool[]>(count + 1);
        for (int64_t i = 0; i < count; ++i) flags[i] = kind == 1 || (kind > 1 && random() % kind);
        validity.append(count, kind == 1 ? nullptr : flags.get());
        model.insert(model.end(), flags.get(), flags.get() + count);
      } else {
        const auto positions = static_cast<int64_t>(random() % (model.size() + 1));
        validity.truncate(positions);
        model.resize(positions);
      }
      expect_equal(validity, model, random);
      if (HasFatalFailure()) return;
    }
  }
}

/// What became padding counts no more; the first position that came valid stays the first.
TEST(PaddingMask, PositionsBecomePaddingAndComeBack) {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    PaddingMask validity;
    std::vector<bool> came;
    std::vector<bool> model;
    for (int step = 0; step < 40; ++step) {
      const uint32_t kind = random() % 4;
      if (kind < 2) {
        const int64_t count = random() % 90;
        const auto flags = std::make_unique<bool[]>(count + 1);
        for (int64_t i = 0; i < count; ++i) flags[i] = random() % 3 > 0;
        validity.append(count, flags.get());
        came.insert(came.end(), flags.get(), flags.get() + count);
        model.insert(model.end(), flags.get(), flags.get() + count);
      } else if (kind == 2) {
        const auto positions = static_cast<int64_t>(random() % (model.size() + 1));
        validity.truncate(positions);
        came.resize(positions);
        model.resize(positions);
      } else {
        std::vector<int64_t> later;
        model = came;
        for (size_t i = 0; i < came.size(); ++i) {
          if (!came[i] || random() % 4 > 0) continue;
          later.push_back(static_cast<int64_t>(i));
          model[i] = false;
        }
        validity.set_later_padding(later);
      }
      std::vector<int64_t> later;
      int64_t all_valid_from = 0;
      for (size_t i = 0; i < model.size(); ++i) {
        ASSERT_EQ(validity.is_valid(i), model[i]);
        ASSERT_EQ(validity.came_valid(i), came[i]);
        if (came[i] && !model[i]) later.push_back(static_cast<int64_t>(i));
        if (!model[i]) all_valid_from = static_cast<int64_t>(i) + 1;
      }
      ASSERT_EQ(validity.later_padding(), later);
      ASSERT_EQ(validity.all_valid_from(), all_valid_from);
      ASSERT_EQ(validity.first_valid(), std::find(came.begin(), came.end(), true) - came.begin());
    }
  }
}

}  // namespace
}  // namespace kvswap
