#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/appender.h"
#include "engine/base_files.h"
#include "engine/batch.h"
#include "engine/calls.h"
#include "engine/clustering.h"
#include "engine/layer_steps.h"
#include "engine/past_reader.h"
#include "engine/sealer.h"
#include "io/saved_tensor.h"

namespace kvswap {

/// Where a session is saved to. Calls come in this order; an error ends them.
class SaveTarget {
 public:
  virtual ~SaveTarget() = default;
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
class Saver {
 public:
  Saver(Calls& calls, EngineParts& parts, Batch& batch, Sealer& sealer, PastReader& past,
        LayerSteps& steps, Appender& appender, Clustering& clustering)
      : calls_(calls),
        parts_(parts),
        batch_(batch),
        sealer_(sealer),
        past_(past),
        steps_(steps),
        appender_(appender),
        clustering_(clustering) {}

  Status save(SaveTarget& target);

  /// What a fork begins with, see EngineOptions::base and Loader; `tensors` stand until the
  /// session's next call.
  struct Shared {
    std::shared_ptr<const BaseFiles> base;
    SavedCounts counts;
    std::vector<SavedTensor> tensors;
    Summaries* summaries = nullptr;  // which the fork shares; null: they are among `tensors`
  };
  Result<Shared> share();

  /// Reads all pages of a layer's clusters, which read_back() does not.
  Status verify_clusters(int64_t layer);

 private:
  using Numbers = std::shared_ptr<const std::vector<uint32_t>>;  // of the store's record -> saved

  Status begin(const char* where);
  Status settle();
  Status write(SaveTarget& target);
  SavedCounts counts() const;
  bool may_link() const;
  Result<bool> link(SaveTarget& target);
  /// Records in the order of their numbers, with what is noted of each.
  struct Records {
    std::vector<SavedRecord> sums;
    std::vector<int8_t> notes;
  };
  Status copy(SaveTarget& target, uint64_t seed, Records& records, std::vector<uint32_t>& numbers);
  Status copy_records(SaveTarget& target, uint64_t seed, const PastReader::Records& some,
                      const std::shared_ptr<std::byte>& buffer, Records& records,
                      std::vector<uint32_t>& numbers);
  std::vector<SavedTensor> list(Records records, const Numbers& numbers, bool has_summaries);
  void list_records(Records records, std::vector<SavedTensor>& tensors) const;
  void list_layer(int64_t layer, const Numbers& numbers, std::vector<SavedTensor>& tensors);
  void list_sinks(int64_t layer, std::vector<SavedTensor>& tensors);
  void seal_file(std::shared_ptr<DataFile> next);

  Calls& calls_;
  EngineParts& parts_;
  Batch& batch_;
  Sealer& sealer_;
  PastReader& past_;
  LayerSteps& steps_;
  Appender& appender_;
  Clustering& clustering_;
};

}  // namespace kvswap
