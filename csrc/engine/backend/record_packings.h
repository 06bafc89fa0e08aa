#pragma once

#include <memory>

#include "kernels/records.h"
#include "kernels/types.h"
#include "kvswap/settings.h"
#include "store/record_packing.h"

namespace kvswap {

/// How records of these settings stand in the file where pages have them in the model's dtype;
/// null: the file has them as pages do.
///
/// storage.kv_dtype int4: see Int4Shape. fp8_e4m3 where clusters are chosen: each token has
/// exponents of its own, so that no other token of its page changes what becomes of it, and packing
/// a cluster anew from what was unpacked changes no value. A record is then its elements in e4m3,
/// in the record's order, and their exponents, int8 `[kv_heads, 2, group_tokens]`.
std::unique_ptr<const RecordPacking> record_packing(const Settings& settings,
                                                    const RecordShape& shape, DType dtype);

}  // namespace kvswap
