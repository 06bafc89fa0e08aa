// The memory that kept tokens take.

#include "engine/keeping.h"

namespace kvswap {
namespace {

/// Numbers that stand beside a token from turn to turn.
int64_t numbers_a_token(const KeepPlan& keep) {
  if (keep.kind.is_given) return 2;  // its worth, and how that decays
  return keep.weighs_attended ? 1 : 0;
}

}  // namespace

int64_t Keeping::bytes_per_layer(const EngineOptions& apart, int64_t token_page_bytes) {
  const KeepPlan keep(apart);
  if (keep.pages == 0) return 0;
  const int64_t window =
      keep.kind.is_given || keep.kind.keeps_outliers
          ? 0
          : apart.keep_window * apart.query_heads *
                (apart.head_dim * dtype_bytes(apart.dtype) + int64_t{sizeof(float)});
  const int64_t mass =
      numbers_a_token(keep) * (kMassUnit + apart.tail_tokens) * int64_t{sizeof(float)};
  const int64_t exponents = keep.has_float8 ? keep.entries * page_note_bytes(apart) : 0;
  // Where layers differ: which pages a layer has, and the order of its tokens.
  const int64_t divided =
      keep.divides_layers ? 4 * (keep.pages + keep.layer_pages + keep.tokens_max) : 0;
  const int64_t before = keep.kind.joins ? 4 * keep.tokens_max : 0;  // a chunk, who was to stay
  // Positions, now and next, and groups that are whole.
  return keep.pages * token_page_bytes + 4 * keep.entries + 8 * keep.tokens_max + exponents +
         window + mass + divided + before;
}

int64_t Keeping::bytes_per_group(const EngineOptions& apart) {
  const KeepPlan keep(apart);
  if (keep.pages == 0) return 0;
  const int64_t mass = numbers_a_token(keep) * apart.group_tokens * int64_t{sizeof(float)};
  return mass + (apart.group_tokens + 7) / 8;
}

int64_t Keeping::turn_bytes(const EngineOptions& apart, int64_t groups) {
  const KeepPlan keep(apart);
  if (keep.pages == 0 || groups == 0 || numbers_a_token(keep) == 1) return 0;
  return (groups * apart.group_tokens + kMassUnit) * int64_t{sizeof(float)};
}

int64_t Keeping::sequence_bytes(const EngineOptions& apart) {
  const KeepPlan keep(apart);
  if (keep.pages == 0 || (numbers_a_token(keep) != 1 && !keep.kind.joins)) return 0;
  return StepMass::sequence_bytes(apart, apart.keep_variance > 0
                                             ? StepMass::Numbers::kMeansAndSquares
                                             : StepMass::Numbers::kMeans);
}

int64_t Keeping::fixed_bytes(const EngineOptions& apart, int64_t record_bytes) {
  return Dropping::fixed_bytes(apart) + KeptPages::fixed_bytes(apart, record_bytes) +
         WindowWeigher::fixed_bytes(apart, record_bytes) + Joining::fixed_bytes(apart) +
         GroupFits::fixed_bytes(apart, record_bytes);
}

}  // namespace kvswap
