#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/batch.h"
#include "engine/engine_parts.h"
#include "engine/past_reader.h"
#include "engine/sealer.h"
#include "engine/tail.h"

namespace kvswap {

/// Copies the bytes of tokens that are kept to pages of their own (SequencePages::kept_page()), in
/// the order of their columns: from where they are kept already, from the tail's pages where tokens
/// join (KeeperKind), or from the file, where everything stays as it is. Those that are to be kept
/// in e4m3 are encoded; one whose record is gone is decoded. An error leaves what was kept.
/// Not thread-safe.
class KeptPages {
 public:
  KeptPages(EngineParts& parts, Batch& batch, const Tail& tail, Sealer& sealer, PastReader& past)
      : parts_(parts), batch_(batch), tail_(tail), sealer_(sealer), past_(past) {}

  /// Those of a part are kept from now on, and no others: `columns` in the model's dtype, `float8`
  /// in e4m3, which must be kept by now; both rising.
  Status adopt(int64_t layer, int64_t part, std::vector<int32_t> columns,
               std::vector<int32_t> float8 = {});
  /// Those, newer than all that are kept and rising, behind them. There must be room.
  Status append(int64_t layer, int64_t part, std::span<const int32_t> columns);

  /// Kept page `page` of those in e4m3, in the model's dtype: [group_bytes]. Stands until the next
  /// call.
  const std::byte* decoded(int64_t layer, int64_t part, int64_t page);

  /// What it allocates.
  static int64_t fixed_bytes(const EngineOptions& apart, int64_t record_bytes);

 private:
  Status gather(int64_t layer, int64_t part, std::span<const int32_t> columns);
  Status read_groups(int64_t layer, int64_t part, std::span<const int32_t> columns, size_t first,
                     size_t& end);
  const std::byte* page_in_tail(int64_t layer, int64_t part, int64_t group);
  void put_rounded(int64_t layer, int64_t part, int32_t column, int64_t place);
  /// Token `slot` of a page becomes gathered token `place`.
  void put(int64_t place, const std::byte* page, int64_t slot);
  void encode(int64_t layer, int64_t part, std::span<const int32_t> columns,
              std::vector<int8_t>& exponents);

  EngineParts& parts_;
  Batch& batch_;
  const Tail& tail_;
  Sealer& sealer_;
  PastReader& past_;

  std::vector<std::byte> gathered_;   // [kept_pages, group_bytes]
  std::vector<std::byte> decoded_;    // [group_bytes]
  std::vector<std::byte> rounded_;    // [payload_bytes]: of records in e4m3, before that
  std::vector<std::byte> unencoded_;  // [group_bytes]
  std::vector<size_t> missing_;       // of the columns, those that are to be read
  Fetch fetch_;
};

}  // namespace kvswap
