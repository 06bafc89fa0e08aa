// A session without a directory: as with one while nothing that was dropped is asked for.

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <random>
#include <vector>

#include "kvswap/cache.h"
#include "kvswap/errors.h"

namespace kvswap {
namespace {

constexpr int64_t kHeads = 4;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kDim = 64;

CacheOptions dropping(const std::string& directory, const std::string& keeper) {
  CacheOptions options;
  options.shape = {.layers = 1, .heads = kHeads, .kv_heads = kKvHeads, .head_dim = kDim};
  options.settings.rows = "none";
  options.settings.keeper = keeper;
  options.settings.groups_max = 1;
  options.settings.tail_tokens = 8;
  options.settings.sink_tokens = 4;
  options.settings.select_queries_max = 4;
  if (keeper != "newest") options.settings.keep_tokens = 12;
  options.directory = directory;
  return options;
}

std::vector<float> drawn(std::mt19937& random, int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(random);
  return numbers;
}

/// The tokens of one pass, [heads, tokens, head_dim] each.
struct Piece {
  int64_t tokens;
  std::vector<float> query, keys, values;

  Piece(std::mt19937& random, int64_t count)
      : tokens(count),
        query(drawn(random, kHeads * count * kDim)),
        keys(drawn(random, kKvHeads * count * kDim)),
        values(drawn(random, kKvHeads * count * kDim)) {}

  /// [tokens, heads, head_dim]
  std::vector<float> run(Cache& session) const {
    std::vector<float> output(query.size());
    const bool is_short = tokens <= session.options().settings.select_queries_max;
    session.begin_pass(is_short ? Pass::kDecode : Pass::kPrefill);
    session.append(
        0, NewTokens::packed(keys.data(), values.data(), session.options().shape, 1, tokens));
    session.attend(0, Queries::packed(query.data(), kHeads, tokens, kDim), 0.125f, output.data());
    return output;
  }
};

TEST(CoreDropping, OnePromptIsAsWithADirectory) {
  for (const char* keeper : {"newest", "observed", "heavy", "arkv"}) {
    std::mt19937 random(1);
    Cache there(dropping(std::filesystem::temp_directory_path(), keeper));
    Cache gone(dropping("", keeper));
    for (const int64_t tokens : {200, 1, 1, 3, 1, 1, 1, 1, 1}) {
      const Piece pass(random, tokens);
      EXPECT_EQ(pass.run(there), pass.run(gone)) << keeper;
    }
    EXPECT_EQ(gone.report().counters.at("bytes_written"), 0);
    EXPECT_EQ(gone.report().counters.at("tokens_dropped"),
              there.report().counters.at("tokens_dropped"));
    EXPECT_GT(gone.report().counters.at("tokens_dropped"), 100);
  }
}

TEST(CoreDropping, ALaterPromptAttendsItselfAndWhatIsLeft) {
  std::mt19937 random(2);
  Cache session(dropping("", "newest"));
  const Piece first(random, 200), second(random, 30);
  first.run(session);
  const std::vector<float> output = second.run(session);
  // Two steps of 4 have left a tail of 8, in groups of 4; the sinks are the first group.
  const int64_t begin = (200 - 2 * 4 - 8) / 4 * 4;
  for (int64_t token = 0; token < second.tokens; ++token) {
    for (int64_t head = 0; head < kHeads; ++head) {
      const int64_t kv = head / (kHeads / kKvHeads);
      std::vector<double> sum(kDim, 0);
      double total = 0;
      const auto meet = [&](const Piece& pass, int64_t at) {
        const int64_t entry = (kv * pass.tokens + at) * kDim;
        double product = 0;
        for (int64_t i = 0; i < kDim; ++i) {
          product += second.query[(head * second.tokens + token) * kDim + i] * pass.keys[entry + i];
        }
        const double weight = std::exp(0.125 * product);
        total += weight;
        for (int64_t i = 0; i < kDim; ++i) sum[i] += weight * pass.values[entry + i];
      };
      for (int64_t at = 0; at < 4; ++at) meet(first, at);
      for (int64_t at = begin; at < 200; ++at) meet(first, at);
      for (int64_t at = 0; at <= token; ++at) meet(second, at);
      for (int64_t i = 0; i < kDim; ++i) {
        ASSERT_NEAR(output[(token * kHeads + head) * kDim + i], sum[i] / total, 1e-4);
      }
    }
  }
}

TEST(CoreDropping, WhatIsRefused) {
  std::mt19937 random(3);
  Cache session(dropping("", "observed"));
  Piece(random, 200).run(session);
  try {
    session.crop(100);
    FAIL() << "those are gone";
  } catch (const SessionError& error) {
    EXPECT_EQ(error.kind(), SessionError::Kind::kDropped);
  }
  EXPECT_EQ(session.layer(0).positions, 200);
  session.crop(0);
  Piece(random, 20).run(session);
  CacheOptions all = dropping("", "observed");
  all.settings = {};
  EXPECT_THROW(Cache{all}, std::invalid_argument);
  OpenArgs args;
  args.shape = all.shape;
  EXPECT_THROW(Cache{args}, std::invalid_argument);
}

}  // namespace
}  // namespace kvswap
