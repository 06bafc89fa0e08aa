#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/appender.h"
#include "engine/call_guard.h"
#include "engine/clusters/cluster_updater.h"
#include "engine/prefill/prefix_reader.h"
#include "engine/sequence/batch.h"
#include "engine/sequence/sealer.h"
#include "engine/snapshot/parent_files.h"
#include "engine/step/step_coordinator.h"
#include "io/saved_tensor.h"

namespace kvswap {

/// What an engine that continues a session is given of its summaries.
enum class SharedRows {
  kAll,
  kNone,  // but those that are made without projections: the others are made again
};

/// Where a session is saved to. Calls come in this order; an error ends them.
class SnapshotTarget {
 public:
  virtual ~SnapshotTarget() = default;
  /// Takes the file of that descriptor as it stands; false where it cannot be had so, and its
  /// records are to be written instead.
  virtual Result<bool> link_records(int fd) = 0;
  /// The next records, in order.
  virtual Status write_records(std::span<const std::byte> records) = 0;
  /// All the rest; what was saved is there for good when it returns.
  virtual Status finish(const SavedCounts& counts, std::span<const SavedTensor> tensors) = 0;
};

/// What a session holds, for a saved one or a fork.
///
/// The session goes on as before: where its own file became the saved one, or a fork's, new records
/// go to another file. Beside the budget it takes a few bytes a record while it runs. Not
/// thread-safe.
class SnapshotWriter {
 public:
  SnapshotWriter(CallGuard& calls, EngineContext& context, Batch& batch, Sealer& sealer,
                 PrefixReader& past, StepCoordinator& steps, Appender& appender,
                 ClusterUpdater& clustering)
      : calls_(calls),
        context_(context),
        batch_(batch),
        sealer_(sealer),
        past_(past),
        steps_(steps),
        appender_(appender),
        clustering_(clustering) {}

  Status save(SnapshotTarget& target);

  /// What a fork begins with, see EngineOptions::base and SnapshotReader; `tensors` stand until the
  /// session's next call.
  struct Shared {
    std::shared_ptr<const ParentFiles> base;
    SavedCounts counts;
    std::vector<SavedTensor> tensors;
    SummaryStore* summaries = nullptr;  // which the fork shares; null: what it has is in `tensors`
  };
  Result<Shared> share(SharedRows rows = SharedRows::kAll);

  /// Reads all pages of a layer's clusters, which read_back() does not.
  Status verify_clusters(int64_t layer);

 private:
  using Numbers = std::shared_ptr<const std::vector<uint32_t>>;  // of the store's record -> saved

  Status begin(const char* where);
  Status drain();
  Status write(SnapshotTarget& target);
  SavedCounts counts() const;
  bool may_link() const;
  Result<bool> link(SnapshotTarget& target);
  /// Records in the order of their numbers, with what is noted of each.
  struct Records {
    std::vector<SavedRecord> sums;
    std::vector<int8_t> notes;
  };
  Status copy(SnapshotTarget& target, uint64_t seed, Records& records,
              std::vector<uint32_t>& numbers);
  Status copy_records(SnapshotTarget& target, uint64_t seed, const PrefixReader::Records& some,
                      const std::shared_ptr<std::byte>& buffer, Records& records,
                      std::vector<uint32_t>& numbers);
  std::vector<SavedTensor> list(Records records, const Numbers& numbers, bool has_summaries);
  void list_records(Records records, std::vector<SavedTensor>& tensors) const;
  void list_layer(int64_t layer, const Numbers& numbers, std::vector<SavedTensor>& tensors);
  void list_sinks(int64_t layer, std::vector<SavedTensor>& tensors);
  void seal_file(std::shared_ptr<DataFile> next);

  CallGuard& calls_;
  EngineContext& context_;
  Batch& batch_;
  Sealer& sealer_;
  PrefixReader& past_;
  StepCoordinator& steps_;
  Appender& appender_;
  ClusterUpdater& clustering_;
};

}  // namespace kvswap
