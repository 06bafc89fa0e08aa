#pragma once

#include "kernels/low_rank_score.h"

namespace kvswap {

/// low_rank_score() of rows of whole numbers, int8 or int4, by whole products: of a query's columns
/// stand there three digits to base 256, which are its numbers to 2^-24 of the largest, as near as
/// fp32 sums come. A row is read once for four queries, and costs no more than reading it.
///
/// Returns false where this processor has no such products (AVX-512 VNNI), or a query is too large
/// or too small for them, or is no number; then nothing is written.
bool digit_score(const LowRankScoreArgs& args);

}  // namespace kvswap
