// What a pass is, is said by the program.

#include <gtest/gtest.h>

#include "public/plain_attention.h"

namespace kvswap {
namespace {

/// Chooses 3 groups, by a projection that knows nothing.
CacheOptions choosing(const std::string& directory) {
  CacheOptions options = covering(directory);
  options.settings.groups_max = 3;
  options.settings.pages_max = 8;
  return options;
}

void set_projections(Cache& cache) {
  const Projection pair = {32, 8, std::vector<float>(32 * 8, 0.1f), std::vector<float>(32 * 8, 1)};
  for (const int64_t layer : {0, 1}) cache.set_projection(layer, pair);
}

TEST(Passes, APrefillIsExactHoweverShort) {
  for (const char* device : {"cpu", "host"}) {
    for (const bool extends : {false, true}) {
      const Folder folder;
      CacheOptions options = choosing(folder.path());
      options.device = device;
      Cache cache(options);
      set_projections(cache);
      Plain plain(options, 2);
      plain.extends = extends;
      for (const int64_t tokens : {100, 1, 1, 3, 8, 1}) {
        plain.pass(cache, Pass::kPrefill, tokens, 1e-5);
      }
      EXPECT_EQ(cache.report().counters.at("steps"), 0) << "none of them chose";
      EXPECT_EQ(cache.held().positions, 114);
    }
  }
}

TEST(Passes, WhatWasReadInShortPiecesIsChosenFrom) {
  const Folder folder;
  Cache cache(choosing(folder.path()));
  set_projections(cache);
  Plain plain(cache.options(), 1);
  for (int piece = 0; piece < 60; ++piece) plain.pass(cache, Pass::kPrefill, 1, 1e-5);
  std::vector<float> numbers(4 * 16, 0.5f);
  cache.begin_pass(Pass::kDecode);
  cache.append(0, NewTokens::packed(numbers.data(), numbers.data(), cache.options().shape, 1, 1));
  cache.attend(0, Queries::packed(numbers.data(), 4, 1, 16), 0.25f, numbers.data());
  EXPECT_EQ(cache.last_selection(0).at(0).size(), 3u);
}

TEST(Passes, ALongOneIsNoStepOfDecoding) {
  const Folder folder;
  Cache cache(choosing(folder.path()));
  Plain plain(cache.options(), 1);
  plain.step(cache, 40, 1e-5);
  cache.begin_pass(Pass::kDecode);
  const std::vector<float> numbers(4 * 9 * 16, 0.5f);
  const auto tokens =
      NewTokens::packed(numbers.data(), numbers.data(), cache.options().shape, 1, 9);
  try {
    cache.append(0, tokens);
    FAIL() << "9 tokens must be refused";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("at most selection.max_step_tokens (8) tokens, got 9"),
              std::string::npos)
        << error.what();
  }
  EXPECT_EQ(cache.held().positions, 40);
  plain.pass(cache, Pass::kPrefill, 9, 1e-5);
}

}  // namespace
}  // namespace kvswap
