#pragma once

#include <cstdint>

#include "engine/engine_options.h"
#include "methods/keeper.h"

namespace kvswap {

/// What the settings of a keeper come to: by what tokens are chosen, and the pages they take.
struct KeepPlan {
  explicit KeepPlan(const EngineOptions& apart);

  const KeeperKind& kind;
  // While decoding, are they chosen by what was paid those that were attended, or by all that is
  // on disk?
  bool weighs_attended;
  bool weighs_disk;
  bool shares_groups;        // each prompt decides how many
  bool divides_layers;       // layers differ in how many of their tokens are kept
  bool has_float8;           // some of them are in e4m3
  int64_t float8_per_token;  // so many of e4m3 take the bytes of one of the model's dtype
  int64_t float8_a_room;     // so many of e4m3 count as one of the model's dtype
  int64_t in_dtype_max;      // of a layer that are kept at once in the model's dtype
  int64_t tokens_max;        // the same, of both precisions
  int64_t pages;  // of each layer, on average where they differ; 0: no keeper of tokens; those
                  // in e4m3 share them, from behind
  int64_t layer_pages;      // of one layer at most
  int64_t entries;          // in a page table: where all pages are divided among tokens in e4m3
  int64_t numbers_a_token;  // beside a token from turn to turn: its worth, and how that decays
  int64_t step_numbers;     // of each token that a step attends, see Plan::step_mass_bytes()
  int64_t bytes_per_group;  // of what stands from turn to turn beside a group of a sequence

  /// Of a turn: worths of the tokens of so many groups, where they do not stand from turn to turn.
  int64_t turn_bytes(int64_t groups, int64_t group_tokens) const;
};

}  // namespace kvswap
