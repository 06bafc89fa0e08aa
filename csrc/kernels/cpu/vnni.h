#pragma once

#include "kernels/int8_score.h"

namespace kvswap {

/// Has this CPU the byte products of AVX-512 (VNNI, VBMI), and is that level in use?
bool has_vnni();

/// int8_score() by them. Only where has_vnni().
void int8_score_vnni(const Int8ScoreArgs& args);

}  // namespace kvswap
