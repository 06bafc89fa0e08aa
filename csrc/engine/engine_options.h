#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/device.h"
#include "engine/backend/record_packings.h"
#include "engine/snapshot/parent_files.h"
#include "io/block_reader.h"
#include "io/data_file.h"
#include "io/readers.h"
#include "io/status.h"
#include "kernels/records.h"
#include "kernels/types.h"
#include "kvswap/settings.h"
#include "memory/page_pool.h"
#include "methods/summary/summary_encoder.h"
#include "store/paired_pool_layout.h"

namespace kvswap {

/// What becomes of a predicted query.
enum class LookAheadMode {
  kOff,     ///< nothing
  kTrust,   ///< it chooses
  kVerify,  ///< what it would choose is prefetched, and the true query chooses
};

/// What an engine is made of: the settings, and what the model, the place and the promises add.
///
/// Its parts see apart(): with heads=each every KV head of a sequence is a sequence of its own, of
/// a model with one KV head. Only the Engine's face, what reads its callers' tensors, and rows with
/// projections know that `heads_apart` of them belong together.
struct EngineOptions : Settings {
  // The model: layers that live on disk, and the shape of one token entry.
  int64_t layers = 0;
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t sides = 2;      // K and V, or 1: K alone, which is the values too
  int64_t value_dim = 0;  // of V, at most head_dim; 0: as wide as K
  DType dtype = DType::kFloat32;
  std::vector<int64_t> ranks;  // [layers]; in the place of `rank`

  // The place.
  std::string directory;  // on the disk to use; must exist; empty: none, see drops()
  int64_t file_extend_bytes = 64 << 20;
  std::optional<DeviceKind> device;  // where pages, summaries and tokens live; none: host memory
  // Put something between the engine and its file or reader: a measurement, a fault.
  std::function<std::unique_ptr<DataFile>(std::unique_ptr<DataFile>)> wrap_file;
  std::function<std::unique_ptr<BlockReader>(std::unique_ptr<BlockReader>)> wrap_reader;

  // What the session continues; null: it begins empty.
  std::shared_ptr<const ParentFiles> base;

  // Promises; -1: none.
  int64_t kv_memory_bytes = -1;
  int64_t max_context = -1;
  int64_t max_batch = -1;

  int64_t timeline_spans = 0;    // how many of the newest are kept; 0: nothing is recorded
  bool tells_attention = false;  // with keeper=given: AttendArgs::received may be asked for

  /// KV heads of a sequence that choose, and stand, apart: 1, or all of them with heads=each. In
  /// options that are apart(): sequence s is head s % heads_apart of the caller's s / heads_apart.
  int64_t heads_apart = 1;
  /// What the parts of an engine see of these options. The same where heads choose together.
  EngineOptions apart() const;
  /// The least group_tokens whose record fills at least half of what the disk reads at once.
  int64_t group_tokens_min(int64_t alignment_bytes) const;

  /// The first thing that is wrong with them: a setting that breaks its rule, a model's shape.
  Status validate() const;
  /// Beside it, what an engine needs to open: a directory, or a method that drops.
  Status check_place() const;

  // What the words of settings stand for, in options that are valid: of one that is open its Plan
  // says it.
  DataFileOptions file_options() const;
  ReaderOptions reader_options() const;
  MethodOptions method() const;
  AtEnd memory_at_end() const { return wipe_on_close ? AtEnd::kWiped : AtEnd::kLeft; }
  /// audit_every, or how often missed_mass_max has layers look; 0: never.
  int64_t steps_between_looks() const {
    return audit_every > 0 || !missed_mass_max ? audit_every : kStepsBetweenLooks;
  }
  static constexpr int64_t kStepsBetweenLooks = 32;

  /// Tokens that the groups of a step hold.
  int64_t selected_tokens() const { return groups_max * group_tokens; }
  /// Are groups selected? Else what is kept is attended alone.
  bool selects() const { return rows != "none"; }
  /// Is what is neither sink nor kept nor newest gone for good, and no file opened? Records then
  /// stand in memory until it is chosen which tokens are retained.
  bool drops() const { return directory.empty() && !selects() && keeper != "none"; }
  /// So many of the newest positions may be cropped at any time where it is: two steps.
  int64_t positions_to_crop() const { return 2 * select_queries_max; }

  /// In the file and in the pages that records are read to.
  bool has_float8_records() const { return records == "fp8" && grouping != "clusters"; }
  bool has_int4_records() const { return records == "int4"; }
  /// Null: records stand in the file as in pages.
  std::unique_ptr<const RecordPacking> packing() const {
    return record_packing(*this, record_shape(), dtype);
  }
  /// A group's tokens in the model's dtype, as tail and sinks hold them.
  RecordShape record_shape() const;
  /// The same in the pages that records are read to.
  int64_t page_bytes() const;
  /// The same on disk.
  int64_t payload_bytes() const;
  /// Exponents that are kept in memory with a record of e4m3: [kv_heads, 2].
  int64_t note_bytes() const { return has_float8_records() ? 2 * record_shape().kv_heads : 0; }
  /// Groups that are sealed once `positions` tokens are there and nothing is pending.
  int64_t sealed_groups(int64_t positions) const;
};

/// As it comes to here: verify is off where there is nothing to predict, or no page to spare.
LookAheadMode look_ahead_mode(const EngineOptions& options);
/// Why it is off where the settings say verify; empty: it is not.
std::string why_no_prefetch(const EngineOptions& options);

/// Are clusters of similar keys chosen, in the place of groups?
inline bool has_clusters(const EngineOptions& options) { return options.grouping == "clusters"; }
/// Can a sequence's tokens be counted? Places are numbers of 32 bits.
Status check_context(const EngineOptions& options, int64_t tokens);
/// Where their pages stand in pools.
PoolOptions pool_options(const EngineOptions& options);

inline constexpr int64_t kContextMax =
    std::numeric_limits<int32_t>::max();  // positions are of 32 bits
inline constexpr int64_t kBatchMax = 65536;

}  // namespace kvswap
