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
  return apart.kept_pages() * token_page_bytes + 4 * apart.kept_entries() +
         8 * KeptPages::tokens_max(apart) + exponents + window + mass;
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
  return StepMass::sequence_bytes(apart, apart.keep_variance > 0
                                             ? StepMass::Numbers::kMeansAndSquares
                                             : StepMass::Numbers::kMeans);
}

int64_t Keeping::fixed_bytes(const EngineOptions& apart, int64_t record_bytes) {
  return Dropping::fixed_bytes(apart) + KeptPages::fixed_bytes(apart, record_bytes) +
         WindowWeigher::fixed_bytes(apart, record_bytes) + Joining::fixed_bytes(apart);
}

}  // namespace kvswap
