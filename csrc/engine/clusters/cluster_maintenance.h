#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/clusters/cluster_loader.h"
#include "engine/clusters/cluster_writer.h"
#include "engine/clusters/token_locator.h"

namespace kvswap {

/// A row of a layer whose tokens enter clusters, and where their bytes are.
struct EnteringRow {
  int64_t layer = 0;
  int64_t sequence = 0;
  TokenLocator bytes;

  ClusterRow& data() const { return bytes.row(); }
  KeyRows keys() const;
  /// See ClusterPages.
  int64_t other_in_slots(int64_t cluster) const;
};

/// What becomes of rows whose tokens have entered: clusters are split, and packed anew, until no
/// more tokens wait than may.
///
/// First what is in memory, of each row by itself; then clusters are read for who waits, of all
/// rows together as far as the memory for it goes. Which they are, and in which order they are
/// written, depends on neither the disk nor threads. Not thread-safe.
class ClusterMaintenance {
 public:
  ClusterMaintenance(EngineContext& context, ClusterWriter& writer)
      : context_(context), writer_(writer), reads_(context) {}

  /// Of rows of one layer. After an error each token is at one place, and more may wait than
  /// should.
  Status drain(std::span<EnteringRow> rows);

 private:
  /// A cluster that is read for those who wait for it: then it is split, or packed with them.
  struct Forced {
    EnteringRow* row = nullptr;
    int64_t cluster = 0;
    bool is_split = false;
  };
  bool too_many_wait(const EnteringRow& row) const;
  Status settle_in_memory(EnteringRow& row);
  Status pack_changed(EnteringRow& row);
  Status pack_some(EnteringRow& row);
  Status force_some(std::span<EnteringRow> rows);
  std::vector<Forced> find_forced(EnteringRow& row);
  /// Tokens whose bytes it takes.
  std::vector<int64_t> taken_from(const Forced& forced) const;
  Status split_or_pack(const Forced& forced);

  EngineContext& context_;
  ClusterWriter& writer_;
  ClusterLoader reads_;
};

}  // namespace kvswap
