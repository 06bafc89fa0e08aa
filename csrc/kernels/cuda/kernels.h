#pragma once

#include <cstdint>

#include "io/status.h"
#include "kernels/attention_mass.h"
#include "kernels/fp8.h"
#include "kernels/group_mass.h"
#include "kernels/group_rows.h"
#include "kernels/low_rank_score.h"
#include "kernels/merge_attention.h"
#include "kernels/observe_keys.h"
#include "kernels/paged_attention.h"
#include "kernels/paged_gather.h"
#include "kernels/record_codec.h"
#include "kernels/records.h"
#include "kernels/types.h"

/// The ops of csrc/kernels/*.h on a CUDA device. What an op computes stands in its contract header;
/// here is what differs: every pointer is a device address, and one launch covers a whole batch.
///
/// Rules of all of them:
///   - `stream` is a cudaStream_t. The call only enqueues; it never synchronises or allocates.
///   - `scratch` is device memory of ..._scratch_bytes(), 16-byte aligned, free again once the
///     stream has passed the call. 0 bytes: null will do.
///   - Arrays of addresses and of indices are device memory too, read when the kernel runs.
///   - Pages, records, summaries and every tensor are 16-byte aligned at their base.
///   - head_dim of attention: a multiple of 8, at most 256. Sizes of 0 are fine and launch nothing.
///   - A Status that is not ok says what a launch was refused for. Later errors come back from
///     the stream, as CUDA has it.
///   - Same arguments, same bits: sums are taken in a fixed order, and nothing waits for an atomic.
namespace kvswap::cuda {

/// Of a summary that is scored.
inline constexpr int64_t kSummaryRankMax = 1024;

/// Summaries of a batch, each in chunks of whole blocks of 16 tokens; one chunk where it is one
/// piece. All have the same rank and dtype.
struct SummaryTable {
  const void* const* chunks = nullptr;   // [batch, chunks_max]: [chunk_tokens / 16, rank, 16] each
  const float* const* scales = nullptr;  // [batch, chunks_max]: [chunk_tokens] each; int8 only
  int64_t chunks_max = 0;
  int64_t chunk_tokens = 0;  // a multiple of 16
  int64_t rank = 0;
  DType dtype = DType::kFloat32;
};

struct BatchScoreArgs {
  SummaryTable summary = {};
  const float* query = nullptr;  // [batch, queries, rank]
  float* scores = nullptr;       // [batch, queries, tokens]
  int64_t batch = 0;
  int64_t queries = 0;
  int64_t tokens = 0;  // a multiple of 16
};

/// low_rank_score() of a batch.
Status low_rank_score(const BatchScoreArgs& args, void* stream);

struct BatchGroupMaxArgs {
  const float* scores = nullptr;  // [rows, tokens]
  float* group_scores = nullptr;  // [rows, ceil(tokens / group_tokens)]
  int64_t rows = 0;
  int64_t tokens = 0;
  int64_t group_tokens = 0;  // 1..64
};

/// group_max() of a batch.
Status group_max(const BatchGroupMaxArgs& args, void* stream);

inline constexpr int64_t kTopKMax = 4096;

struct BatchTopKArgs {
  const float* scores = nullptr;    // [rows, row_stride]: `counts` or `count` of each are looked at
  const int32_t* counts = nullptr;  // [rows]; null: `count` of every row
  const int32_t* wanted = nullptr;  // [rows]: of each at most as many, and k; null: k of every row
  int32_t* indices = nullptr;       // [rows, k] out: rising, then -1
  int32_t* chosen = nullptr;        // [rows] out: how many
  int64_t rows = 0;
  int64_t row_stride = 0;  // elements
  int64_t count = 0;       // of the longest row
  int64_t k = 0;           // at most kTopKMax; with a `count` of at most 16384 any
  void* scratch = nullptr;
};

/// top_k() of each row.
Status top_k(const BatchTopKArgs& args, void* stream);
/// Also enough for a smaller count and a smaller k.
int64_t top_k_scratch_bytes(int64_t rows, int64_t count, int64_t k);

struct BatchSelectArgs {
  SummaryTable summary = {};
  /// [batch, queries, rank]; by mass [batch, queries, heads, rank], times attention's scale. Each
  /// query chooses its own k groups.
  const float* query = nullptr;
  int64_t heads = 0;  // 0: groups are scored by products; else by mass, see group_mass.h
  HeadJoin join = HeadJoin::kSum;
  /// [batch]; tokens outside [first, last) do not count. Null: 0, and groups * group_tokens.
  const int64_t* first_tokens = nullptr;
  const int64_t* last_tokens = nullptr;  // 0: nothing is chosen, and nothing is read
  const uint64_t* valid = nullptr;       // [batch, valid_stride]: a bit per token; null: all valid
  int64_t valid_stride = 0;              // words of 64 tokens
  const int32_t* excluded = nullptr;     // [batch, excluded_max]: groups never chosen; -1: none
  int64_t excluded_max = 0;
  int32_t* indices = nullptr;  // [batch, queries, k] out: rising, then -1
  int32_t* chosen = nullptr;   // [batch, queries] out: how many
  int64_t batch = 0;
  int64_t queries = 0;
  int64_t groups = 0;               // of the longest sequence; tokens: groups * group_tokens
  int64_t group_tokens = 0;         // 1..64
  int64_t k = 0;                    // as in BatchTopKArgs
  const int32_t* wanted = nullptr;  // [batch, queries]: as in BatchTopKArgs
  void* scratch = nullptr;
};

/// Score, ReduceMax and TopK: what a SummarySelector's choose() does for one layer, without the
/// union over the queries of a sequence. Token scores never leave the multiprocessor.
Status select_groups(const BatchSelectArgs& args, void* stream);
/// Of batch, queries, heads, rank, groups, group_tokens and k.
int64_t select_groups_scratch_bytes(const BatchSelectArgs& args);

struct BatchMassArgs {
  BatchSelectArgs select = {};    // scored by mass
  float* group_scores = nullptr;  // [batch, queries, score_stride] out; excluded groups: -inf
  int64_t score_stride = 0;
  void* scratch = nullptr;
};

/// group_mass() of each query of a batch over the products with a summary, one query of each
/// sequence after the other, so that only theirs takes scratch.
Status mass_scores(const BatchMassArgs& args, void* stream);
int64_t mass_scores_scratch_bytes(const BatchSelectArgs& args);

/// New rows of one summary chunk.
struct ProjectPiece {
  const void* keys = nullptr;    // [kv_heads, tokens, head_dim], the strides of the call
  void* summary = nullptr;       // [blocks, rank, 16]
  float* token_scale = nullptr;  // [blocks, 16]: int8 summaries only
  int64_t first_row = 0;         // row in the chunk where the first token goes
  int64_t tokens = 0;
};

struct BatchProjectKeysArgs {
  const ProjectPiece* pieces = nullptr;  // [count]
  int64_t count = 0;
  int64_t tokens_max = 0;             // of the longest piece
  int64_t head_stride = 0;            // elements
  int64_t token_stride = 0;           // elements; head_dim is contiguous
  const float* projection = nullptr;  // [kv_heads * head_dim, rank]
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t rank = 0;
  DType key_dtype = DType::kFloat32;
  DType summary_dtype = DType::kFloat32;
};

/// project_keys() of many pieces, of one or of several sequences.
Status project_keys(const BatchProjectKeysArgs& args, void* stream);

/// Whether the query heads of a batch are projected as their sum or each for itself.
enum class QueryHeads : int8_t { kSummed, kEach };

struct BatchProjectQueryArgs {
  const void* query = nullptr;  // [batch, heads, queries, head_dim], strides below; dtype
  int64_t batch_stride = 0;     // elements
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  const float* projection = nullptr;  // [kv_heads * head_dim, rank]
  float* projected = nullptr;  // [batch, queries, rank]; kEach: [batch, queries, heads, rank]
  QueryHeads projects = QueryHeads::kSummed;
  float factor = 1.0f;  // kEach: what the result is multiplied by
  int64_t batch = 0;
  int64_t queries = 0;
  int64_t heads = 0;  // a multiple of kv_heads
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t rank = 0;
  DType dtype = DType::kFloat32;
  /// Above 1: row b of the batch has `heads` heads of the tensor's b / heads_apart, from
  /// b % heads_apart * heads on, and the part of that number of a projection
  /// [heads_apart * kv_heads * head_dim, rank].
  int64_t heads_apart = 1;
};

/// project_query() of each query of a batch.
Status project_query(const BatchProjectQueryArgs& args, void* stream);

/// New rows of groups in one summary chunk.
struct GroupPiece {
  const void* keys = nullptr;  // [kv_heads, groups * group_tokens, head_dim], the call's strides
  const uint64_t* valid = nullptr;  // [groups]; null: all tokens count
  void* summary = nullptr;          // [blocks, width, 16]
  float* row_scale = nullptr;       // [blocks, 16]: int8 summaries only
  int64_t first_row = 0;            // row in the chunk where the first group goes
  int64_t groups = 0;
};

struct BatchSummarizeArgs {
  const GroupPiece* pieces = nullptr;  // [count]
  int64_t count = 0;
  int64_t groups_max = 0;    // of the longest piece
  int64_t head_stride = 0;   // elements
  int64_t token_stride = 0;  // elements; head_dim is contiguous
  int64_t group_tokens = 0;  // 1..64
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  GroupRow row = GroupRow::kBox;
  DType key_dtype = DType::kFloat32;
  DType summary_dtype = DType::kFloat32;
};

/// summarize_groups() of many pieces, of one or of several sequences.
Status summarize_groups(const BatchSummarizeArgs& args, void* stream);

struct BatchAskArgs {
  const void* query = nullptr;  // [batch, heads, queries, head_dim], strides below; dtype
  int64_t batch_stride = 0;     // elements
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  float* asked = nullptr;  // [batch, queries, width]
  int64_t batch = 0;
  int64_t queries = 0;
  int64_t heads = 0;  // a multiple of kv_heads
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  GroupRow row = GroupRow::kBox;
  float weight = 1.0f;  // of half widths
  DType dtype = DType::kFloat32;
  int64_t heads_apart = 1;  // as in BatchProjectQueryArgs
};

/// ask_groups() with all heads of each query of a batch.
Status ask_groups(const BatchAskArgs& args, void* stream);

/// The contract's arguments, all pointers on the device. A page may stand in any memory that the
/// device can address; a null page is never read and counts as empty.
Status paged_attention(const PagedAttentionArgs& args, void* scratch, void* stream);
int64_t paged_attention_scratch_bytes(const PagedAttentionArgs& args);

/// The contracts' arguments; here head_dim is any number up to 256.
Status attention_mass(const AttentionMassArgs& args, void* stream);
Status observe_keys(const ObserveKeysArgs& args, void* scratch, void* stream);
int64_t observe_keys_scratch_bytes(const ObserveKeysArgs& args);

Status merge_attention(const MergeAttentionArgs& args, void* stream);

Status paged_gather(const PagedGatherArgs& args, void* stream);

struct CopyRecordsArgs {
  const void* source = nullptr;             // record i begins at source + offset (or i * stride)
  int64_t source_stride = 0;                // bytes
  const int64_t* source_offsets = nullptr;  // [count] bytes; null: i * source_stride
  void* const* targets = nullptr;           // [count] pages; null: target + i * target_stride
  void* target = nullptr;
  int64_t target_stride = 0;  // bytes
  int64_t count = 0;
  int64_t bytes = 0;  // of a record; 16-byte moves where bytes, strides and offsets allow
};

/// Scatters a staging buffer of records to their pages in one launch.
Status copy_records(const CopyRecordsArgs& args, void* stream);

/// TransferArgs for tokens of many sequences: record i belongs to sequence sequences[i], whose K
/// and V begin at tokens.keys + key_offset(sequences[i]) (elements), V alike. Where KV heads are
/// sequences of their own, sequence s is head s % heads_apart of the tensors' s / heads_apart.
struct BatchTransferArgs {
  RecordShape shape = {};
  TokenView tokens = {};
  int64_t key_batch_stride = 0;
  int64_t value_batch_stride = 0;
  void* const* records = nullptr;         // [count]
  const int32_t* sequences = nullptr;     // [count]; null: 0
  const int64_t* first_tokens = nullptr;  // [count]
  const int32_t* slots = nullptr;         // [count]; null: 0
  const int32_t* lengths = nullptr;       // [count]; null: group_tokens
  int64_t count = 0;
  int64_t heads_apart = 1;  // above 1 shape.kv_heads is 1

  int64_t key_offset(int64_t sequence) const {
    return sequence / heads_apart * key_batch_stride +
           sequence % heads_apart * tokens.key_head_stride;
  }
  int64_t value_offset(int64_t sequence) const {
    return sequence / heads_apart * value_batch_stride +
           sequence % heads_apart * tokens.value_head_stride;
  }
};

/// NHD or HND tokens -> records, and back.
Status pack_records(const BatchTransferArgs& args, void* stream);
Status unpack_records(const BatchTransferArgs& args, void* stream);

/// The contract's arguments; `from`, `to` and exponents stand on the device. The same bytes as the
/// CPU's, but for the sign of what is no number.
Status encode_records(const RecordCodecArgs& args, void* stream);

Status fp8_quantize(const Fp8Args& args, void* stream);
Status fp8_dequantize(const Fp8Args& args, void* stream);

}  // namespace kvswap::cuda
