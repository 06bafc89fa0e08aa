#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "io/saved_tensor.h"
#include "io/status.h"
#include "kernels/types.h"
#include "methods/selection/padding_mask.h"

namespace kvswap {

class SummaryStore;
class UploadRing;
struct ScratchSizes;

/// Keys of one sequence: element (head, token, d) at head * head_stride + token * token_stride + d.
struct KeyView {
  const void* data = nullptr;
  int64_t head_stride = 0;  // elements, as all strides
  int64_t token_stride = 0;
  DType dtype = DType::kFloat32;
};

/// Tokens that join a sequence's summary.
struct SealedKeys {
  int64_t layer = 0;
  int64_t sequence = 0;
  KeyView keys;
  int64_t tokens = 0;
  const PaddingMask* valid = nullptr;  // of the sequence's positions; null: all count
};

/// A sealed group whose row is made again.
struct ChangedKeys {
  int64_t layer = 0;
  int64_t sequence = 0;
  KeyView keys;  // of the group's first token
  int64_t group = 0;
  uint64_t counted = 0;  // bit t: token t counts
};

/// Queries of a layer: [batch, heads, queries, head_dim], head_dim contiguous. Where KV heads are
/// sequences of their own, each has `heads` of the array's heads: sequence s those from
/// s % heads_apart * heads on, of the array's s / heads_apart.
struct QueryView {
  const void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  int64_t heads = 0;  // all heads, or kv_heads: already summed over each GQA group
  int64_t queries = 0;
  DType dtype = DType::kFloat32;
  int64_t heads_apart = 1;

  /// The first number of one row of head_dim.
  const void* at(int64_t sequence, int64_t head, int64_t query) const {
    const int64_t element = sequence / heads_apart * batch_stride +
                            (sequence % heads_apart * heads + head) * head_stride +
                            query * query_stride;
    return static_cast<const std::byte*>(data) + element * dtype_bytes(dtype);
  }
  /// The same array for parts: of each sequence so many, KV heads that choose apart.
  QueryView of_parts(int64_t parts) const {
    QueryView view = *this;
    view.heads /= parts;
    view.heads_apart = parts;
    return view;
  }
};

/// What a group is worth.
enum class Score : int8_t {
  kSum,      ///< the largest product of a token with the sum of all heads' queries (KVSwap 3.3)
  kMax,      ///< the largest product of a token with the query of any head
  kMass,     ///< the attention paid to the group, summed over heads
  kMaxMass,  ///< the attention paid to the group by the head that pays it most
};

/// How well a choice is scored.
enum class Effort : int8_t {
  kWhole,
  /// For less work, where the choice is only prefetched: by mass on the host, each KV head asks
  /// with the mean of its query heads.
  kCoarse,
};

/// Which groups of one sequence may be chosen.
struct Candidates {
  const PaddingMask* valid = nullptr;  // invalid tokens do not score
  std::span<const int32_t> excluded;   // attended anyway (sinks)
  int64_t fewer = 0;                   // groups that each query chooses less, but one
  /// What the step before chose, in rising order. Of other groups each query chooses those alone
  /// that are among the best MethodOptions::new_group_ratio of its choice. Empty: all are free.
  std::span<const int32_t> last = {};
};

struct ChooseArgs {
  int64_t layer = 0;
  QueryView query;
  int64_t groups = 0;  // sealed groups 0..groups-1 of every sequence
  int64_t groups_per_query = 0;
  std::span<const Candidates> candidates;               // [batch]
  std::vector<std::vector<int32_t>>* chosen = nullptr;  // [batch][...] out, in rising order
  // For a score by mass alone.
  float scale = 1.0f;  // of attention
  Effort effort = Effort::kWhole;
};

/// What a layer's groups are worth, said by somebody else.
struct UserScores {
  const float* scores = nullptr;  // [sequences, queries, groups]; -inf: never
  int64_t sequences = 0;
  int64_t queries = 0;
  int64_t groups = 0;
};

/// What a choice is for at most, where its memory is reserved ahead of it.
struct SelectionRoom {
  int64_t batch = 0;
  int64_t queries = 0;
  int64_t groups = 0;    // of a sequence
  int64_t k = 0;         // groups chosen by one query at most
  int64_t sinks = 0;     // groups excluded of a sequence at most
  int64_t rank = 0;      // the widest
  int64_t heads = 0;     // 0: scored by sum
  bool differs = false;  // sequences in how many they choose (Candidates::fewer)
};

/// What a selector that computes on a device is lent there.
struct SelectionPlace {
  SelectionRoom room;
  const ScratchSizes* scratch = nullptr;
  UploadRing* tables = nullptr;
  std::byte* answer = nullptr;  // host memory, pinned: answer_bytes(room)
};

/// Summary + query + budget -> group ids: the part that decides what is read.
///
/// Each query chooses its own `groups_per_query`; the union is returned. Equal scores go to the
/// lower id. A group of only invalid tokens is never chosen. Not thread-safe; uses the threads of
/// its ParallelFor.
class Selector {
 public:
  virtual ~Selector() = default;

  /// Comes before what it must hold, with nothing under way; nothing to do on the host.
  virtual Status reserve(const SelectionPlace&) { return Status::ok(); }

  /// Can the layer choose? What it lacks is a pair of projections.
  virtual bool is_ready(int64_t layer) const = 0;
  /// Both [kv_heads * head_dim, rank], copied. Only while the layer has no rows.
  virtual Status set_projection(int64_t layer, int64_t rank, const float* keys,
                                const float* queries) = 0;
  /// Forgets the projections and the summaries made with them.
  virtual void drop_projection(int64_t layer) = 0;
  virtual int64_t projection_bytes() const = 0;
  /// To be saved; they stand until the selector changes.
  virtual void list_projections(int64_t layer, std::vector<SavedTensor>& tensors) const = 0;

  /// For the layer's next choice alone, of as many sequences, queries and groups; copied. Only
  /// where SummaryKind::is_given; others refuse.
  virtual Status give_scores(int64_t layer, const UserScores& scores) = 0;
  /// Sequences or their tokens have changed: what was given is of others.
  virtual void forget_scores() {}

  /// What it scores groups by.
  virtual SummaryStore& summaries() = 0;
  /// The next sealed tokens of sequences of one layer, whole groups, each sequence once: they are
  /// summarised together. Where one fails those before it are there.
  virtual Status append(std::span<const SealedKeys> sealed) = 0;
  Status append(const SealedKeys& sealed) { return append(std::span(&sealed, 1)); }

  /// Only for rows that stand for groups. The row becomes that of the tokens that count.
  virtual Status rewrite(const ChangedKeys& changed) = 0;

  virtual void choose(const ChooseArgs& args) = 0;
  /// choose() in two halves, for a selector that computes beside its caller: between them nothing
  /// else may be called, args.chosen stays where it is, and the candidates may change.
  virtual Status start_choice(const ChooseArgs& args) {
    choose(args);
    return Status::ok();
  }
  virtual Status finish_choice() { return Status::ok(); }
  /// Is a choice still being computed? finish_choice() would wait for it.
  virtual bool is_choosing() const { return false; }
  /// Seconds that callers waited for choices.
  virtual double wait_seconds() const { return 0; }
  /// Without sequences, summaries and scratch; projections stay.
  virtual void clear() = 0;
};

}  // namespace kvswap
