// The memory that kept tokens take.

#include "engine/keeping.h"

namespace kvswap {
namespace {

bool keeps(const EngineOptions& options) { return options.kept_pages() > 0; }

/// Numbers that stand beside a token from turn to turn.
int64_t numbers_a_token(const EngineOptions& apart) {
  if (apart.keeper_kind().is_given) return 2;  // its worth, and how that decays
  return apart.weighs_attended() ? 1 : 0;
}

/// That are kept at once.
int64_t most_tokens(const EngineOptions& apart) {
  return apart.keep_tokens * (apart.keeps_float8() ? apart.float8_a_room() : 1);
}

}  // namespace

int64_t Keeping::bytes_per_layer(const EngineOptions& apart, int64_t token_page_bytes) {
  if (!keeps(apart)) return 0;
  const bool is_given = apart.keeper_kind().is_given;
  const int64_t window =
      is_given ? 0
               : apart.keep_window * apart.query_heads *
                     (apart.head_dim * dtype_bytes(apart.dtype) + int64_t{sizeof(float)});
  const int64_t mass =
      numbers_a_token(apart) * (kMassUnit + apart.tail_tokens) * int64_t{sizeof(float)};
  const int64_t exponents =
      apart.keeps_float8() ? apart.kept_entries() * apart.page_note_bytes() : 0;
  // Columns, now and next, and groups that are whole.
  return apart.kept_pages() * token_page_bytes + 4 * apart.kept_entries() + 8 * most_tokens(apart) +
         exponents + window + mass;
}

int64_t Keeping::bytes_per_group(const EngineOptions& apart) {
  if (!keeps(apart)) return 0;
  const int64_t mass = numbers_a_token(apart) * apart.group_tokens * int64_t{sizeof(float)};
  return mass + (apart.group_tokens + 7) / 8;
}

int64_t Keeping::turn_bytes(const EngineOptions& apart, int64_t groups) {
  if (!keeps(apart) || groups == 0 || numbers_a_token(apart) == 1) return 0;
  return (groups * apart.group_tokens + kMassUnit) * int64_t{sizeof(float)};
}

int64_t Keeping::sequence_bytes(const EngineOptions& apart) {
  const bool joins = apart.keeper_kind().joins;
  if (!keeps(apart) || (numbers_a_token(apart) != 1 && !joins)) return 0;
  const int64_t copies = apart.keep_variance > 0 ? 2 : 1;
  return int64_t{sizeof(float)} *
         (apart.query_heads * apart.select_queries_max +
          copies * apart.kv_heads * apart.pages_per_layer() * apart.group_tokens);
}

int64_t Keeping::fixed_bytes(const EngineOptions& apart, int64_t record_bytes) {
  const int64_t left_pages =
      apart.drops() ? apart.sink_pages() + most_tokens(apart) / apart.group_tokens + 1 : 0;
  const int64_t left =
      left_pages * (apart.group_bytes() + apart.group_tokens * int64_t{sizeof(int32_t)});
  if (!keeps(apart)) return left;
  const int64_t block = 2 * apart.past_block_groups(record_bytes);
  const int64_t tables = block * (20 + apart.note_bytes() + Fetch::bytes_per_load());
  // Means, and with a variance squares, of one call and of a window's.
  const int64_t copies = apart.keep_variance > 0 || !apart.keep_ratio ? 4 : 1;
  const int64_t mean =
      copies * block * apart.kv_heads * apart.group_tokens * int64_t{sizeof(float)};
  // Where tokens join: new ones, of those kept what they are worth and their order, a record and
  // a page that are encoded.
  const int64_t staying =
      apart.keeper_kind().joins ? most_tokens(apart) * 40 + 2 * apart.group_bytes() : 0;
  const int64_t log_sums =
      apart.query_heads * (kChunkQueriesMax + apart.keep_window) * int64_t{sizeof(float)};
  const int64_t output = apart.weighs_disk() ? apart.query_heads * kChunkQueriesMax *
                                                   apart.head_dim * dtype_bytes(apart.dtype)
                                             : 0;
  const int64_t agreed =
      apart.shares_groups() ? TopOverlap::bytes(apart.query_heads, apart.selected_tokens()) : 0;
  return left + tables + mean + log_sums + output + agreed + staying +
         (apart.kept_pages() + 1) * apart.group_bytes() +
         apart.keep_tokens * int64_t{sizeof(size_t)};
}

}  // namespace kvswap
