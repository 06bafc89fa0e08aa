#pragma once

#include <cstdint>
#include <memory>

#include "engine/engine_options.h"
#include "methods/retention/retention_policy.h"

namespace kvswap {

/// What the settings of a retention policy come to: by what tokens are chosen, and the pages they
/// take.
struct RetentionPlan {
  explicit RetentionPlan(const EngineOptions& apart);

  const RetentionKind& kind;
  std::shared_ptr<const RetentionPolicy> policy;  // null where it keeps no tokens
  // While decoding, are they chosen by the attention received those that were attended, or by all
  // that is on disk?
  bool scores_attended;
  bool scores_all_tokens;
  bool tells_attention;      // steps may be asked what each token received
  bool shares_groups;        // each prompt decides how many
  bool has_layer_budgets;    // layers differ in how many of their tokens are retained
  bool has_float8;           // some of them are in e4m3
  int64_t float8_per_token;  // so many of e4m3 take the bytes of one of the model's dtype
  int64_t float8_a_room;     // so many of e4m3 count as one of the model's dtype
  int64_t in_dtype_max;      // of a layer that are kept at once in the model's dtype
  int64_t tokens_max;        // the same, of both precisions
  int64_t pages;  // of each layer, on average where they differ; 0: no retention policy of tokens;
                  // those in e4m3 share them, from behind
  int64_t layer_pages;  // of one layer at most
  int64_t entries;      // in a page table: where all pages are divided among tokens in e4m3
  int64_t
      numbers_a_token;   // beside a token from refresh to refresh: its worth, and how that decays
  int64_t step_numbers;  // of each token that a step attends, see Plan::step_attention_bytes()
  int64_t bytes_per_group;  // of what is kept from refresh to refresh beside a group of a sequence

  /// Of a refresh: worths of the tokens of so many groups, where they do not is kept from refresh
  /// to refresh.
  int64_t refresh_bytes(int64_t groups, int64_t group_tokens) const;
};

}  // namespace kvswap
