#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/clusters/token_locator.h"
#include "methods/clusters/cluster_pages.h"

namespace kvswap {

/// Clusters become pages on disk: packed, entered in the store, handed to the writer, and then, all
/// of them at once, where their tokens stand. After an error nothing has changed but what is in the
/// reuse buffer. Not thread-safe.
class ClusterWriter {
 public:
  explicit ClusterWriter(EngineContext& context) : context_(context) {}

  /// What packing a cluster anew is: all of it where the layout has no room for the new pages
  /// beside those that would stay. None: nothing is to be packed, or others stand in its slots.
  /// Where plans are written apart it holds until the next one is written.
  std::optional<ClusterPlan> plan(const TokenLocator& bytes, int64_t layer, int64_t sequence,
                                  int64_t cluster) const;
  /// Is a plan to be written before the next one is made?
  bool writes_apart() const;

  /// Of one row; all tokens of the plans are in memory. The pages that they were in let them go;
  /// where a page of the reuse buffer held one of those it holds the new one. Where they are
  /// written apart an error leaves those before it written.
  Status write(TokenLocator& bytes, int64_t layer, int64_t sequence,
               std::span<const ClusterPlan> plans);

 private:
  struct Page {
    const ClusterPlan* plan = nullptr;
    int64_t index = 0;  // of its slots
    int64_t slot() const { return plan->slots[index]; }
  };
  /// Of a plan that was given places of its own.
  struct Place {
    int64_t offset_bytes = 0;
    bool is_before_others = false;  // of the cluster
  };
  std::vector<int64_t> offsets_of(int64_t layer, int64_t sequence,
                                  std::span<const int64_t> slots) const;
  Status write_together(TokenLocator& bytes, int64_t layer, int64_t sequence,
                        std::span<const ClusterPlan> plans, const std::optional<Place>& place);
  Status stage(const TokenLocator& bytes, int64_t layer, std::span<const Page> pages,
               std::optional<int64_t> taken_bytes, RecordStore::StagedRun* run);
  void pack(const TokenLocator& bytes, const Page& page, std::byte* record) const;
  void adopt(const TokenLocator& bytes, const RecordStore::StagedRun& run, int64_t sequence);
  void install(TokenLocator& bytes, int64_t layer, int64_t sequence,
               std::span<const ClusterPlan> plans, std::span<const RecordStore::StagedRun> runs);

  EngineContext& context_;
};

}  // namespace kvswap
