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
/// the order of their positions: from where they are kept already, from the tail's pages where
/// tokens join (KeeperKind), or from the file, where everything stays as it is. Those that are to
/// be kept in e4m3 are encoded; one whose record is gone is decoded. The host does all of it: of a
/// device it copies what is there, and what comes there. An error leaves what was kept. Not
/// thread-safe.
class KeptPages {
 public:
  KeptPages(EngineParts& parts, Batch& batch, const Tail& tail, Sealer& sealer, PastReader& past)
      : parts_(parts), batch_(batch), tail_(tail), sealer_(sealer), past_(past) {}

  /// Those of a part are kept from now on, and no others: `positions` in the model's dtype,
  /// `float8` in e4m3, which must be kept by now; both rising.
  Status adopt(int64_t layer, int64_t part, std::vector<int32_t> positions,
               std::vector<int32_t> float8 = {});
  /// Those, newer than all that are kept and rising, behind them. There must be room.
  Status append(int64_t layer, int64_t part, std::span<const int32_t> positions);

  /// Kept page `page` of those in e4m3, in the model's dtype: [group_bytes]. Stands until the next
  /// call. Pages must be the host's.
  const std::byte* decoded(int64_t layer, int64_t part, int64_t page);

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan);

 private:
  Status look_at_kept(int64_t layer, int64_t part);
  const std::byte* kept_page(int64_t page) const;
  const std::byte* decode(int64_t layer, int64_t part, int64_t page);
  struct Wanted {
    std::span<const int32_t> positions;
    int64_t first_place = 0;  // of the first, in gathered_
  };
  Status gather(int64_t layer, int64_t part, const Wanted& wanted);
  Status read_groups(int64_t layer, int64_t part, const Wanted& wanted, size_t first, size_t& end);
  Status write(int64_t layer, int64_t part, int64_t first_page, int64_t count);
  Result<const std::byte*> page_in_tail(int64_t layer, int64_t part, int64_t group);
  void put_rounded(int64_t layer, int64_t part, int32_t position, int64_t place);
  /// Token `slot` of a page becomes gathered token `place`.
  void put(int64_t place, const std::byte* page, int64_t slot);
  void encode(int64_t layer, int64_t part, std::span<const int32_t> positions,
              std::vector<int8_t>& exponents);

  EngineParts& parts_;
  Batch& batch_;
  const Tail& tail_;
  Sealer& sealer_;
  PastReader& past_;

  const std::byte* kept_ = nullptr;  // the part's kept pages, as the host reads them
  // The same where layers differ in how many they have, and the pages of one stand anywhere.
  const SequencePages* divided_ = nullptr;
  int64_t layer_ = 0;
  std::vector<std::byte> kept_copy_;  // the same, of a device
  std::vector<std::byte> tail_copy_;  // [group_bytes], of a device
  std::vector<std::byte> gathered_;   // [layer_pages, group_bytes]
  std::vector<std::byte> decoded_;    // [group_bytes]
  std::vector<std::byte> rounded_;    // [payload_bytes]: of records in e4m3, before that
  std::vector<std::byte> unencoded_;  // [group_bytes]
  std::vector<size_t> missing_;       // of the positions, those that are to be read
  Fetch fetch_;
};

}  // namespace kvswap
