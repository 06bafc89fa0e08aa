#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/engine_context.h"
#include "engine/prefill/prefix_reader.h"
#include "engine/sequence/batch.h"
#include "engine/sequence/sealer.h"

namespace kvswap {

/// Copies the bytes of retained tokens to pages of their own (SequencePages::retained_page()), in
/// the order of their positions.
///
/// Sources of a token: a page that holds it already, the tail, or its record in the file, which
/// stays as it is. Tokens for e4m3 are encoded; one whose record is discarded is decoded. The host
/// does it; of a device it copies the pages there and back. An error leaves the old set. Not
/// thread-safe.
class RetainedPages {
 public:
  RetainedPages(EngineContext& context, Batch& batch, Sealer& sealer, PrefixReader& past)
      : context_(context), batch_(batch), sealer_(sealer), past_(past) {}

  /// Those of a sequence are kept from now on, and no others: `positions` in the model's dtype,
  /// `float8` in e4m3, which must be kept by now; both rising.
  Status adopt(int64_t layer, int64_t sequence, std::vector<int32_t> positions,
               std::vector<int32_t> float8 = {});
  /// Those, newer than all that are kept and rising, behind them. There must be room.
  Status append(int64_t layer, int64_t sequence, std::span<const int32_t> positions);

  /// Retained page `page` of those in e4m3, in the model's dtype: [group_bytes]. Stands until the
  /// next call. Pages must be the host's.
  const std::byte* decoded(int64_t layer, int64_t sequence, int64_t page);

  /// What it allocates.
  static void reserve(Arena& arena, const Plan& plan);

 private:
  Status map_retained(int64_t layer, int64_t sequence);
  const std::byte* retained_page(int64_t page) const;
  const std::byte* decode(int64_t layer, int64_t sequence, int64_t page);
  struct Wanted {
    std::span<const int32_t> positions;
    int64_t first_place = 0;  // of the first, in gathered_
  };
  Status gather(int64_t layer, int64_t sequence, const Wanted& wanted);
  Status read_groups(int64_t layer, int64_t sequence, const Wanted& wanted, size_t first,
                     size_t& end);
  Status write(int64_t layer, int64_t sequence, int64_t first_page, int64_t count);
  Result<const std::byte*> page_in_tail(int64_t layer, int64_t sequence, int64_t group);
  void put_rounded(int64_t layer, int64_t sequence, int32_t position, int64_t place);
  /// Token `slot` of a page becomes gathered token `place`.
  void put(int64_t place, const std::byte* page, int64_t slot);
  void encode(int64_t layer, int64_t sequence, std::span<const int32_t> positions,
              std::vector<int8_t>& exponents);

  EngineContext& context_;
  Batch& batch_;
  Sealer& sealer_;
  PrefixReader& past_;

  const std::byte* retained_ = nullptr;  // the sequence's retained pages, as the host reads them
  // The same where layers differ in how many they have, and the pages of one stand anywhere.
  const SequencePages* divided_ = nullptr;
  int64_t layer_ = 0;
  std::vector<std::byte> retained_copy_;  // the same, of a device
  std::vector<std::byte> tail_copy_;      // [group_bytes], of a device
  std::vector<std::byte> gathered_;       // [layer_pages, group_bytes]
  std::vector<std::byte> decoded_;        // [group_bytes]
  std::vector<std::byte> rounded_;        // a record as it is in the file, before that
  std::vector<std::byte> unencoded_;      // [group_bytes]
  std::vector<size_t> missing_;           // of the positions, those that are to be read
  Fetch fetch_;
};

}  // namespace kvswap
