#pragma once

#include <cstdint>
#include <memory>

#include "engine/engine.h"
#include "io/status.h"

namespace kvswap {

/// A long chunk that attends exactly.
struct ExactArgs {
  AttendArgs attention;      // pointers are those of the engine's caller
  int64_t past = 0;          // positions before the chunk; the chunk itself may be appended or not
  KeyValueView own = {};     // of the chunk itself
  bool is_own_host = false;  // where `own` is of the host, whatever the caller's device
};

/// A part of the chunk: a sequence's, or that of a KV head of it that is apart. What it visits it
/// attends, over disjoint keys merged by log-sum-exp; its own tokens first.
class ExactPart : public PrefixVisitor {
 public:
  /// When everything has been attended, and there are sinks.
  virtual void add_sinks() = 0;
  /// The newest `most` queries, with what they attended; everything has been attended.
  virtual RetainedTokens::Window window(int64_t most) const = 0;
  /// To the chunk's output.
  virtual void write() = 0;
};

/// One chunk while it attends.
class ExactChunk {
 public:
  virtual ~ExactChunk() = default;
  /// Attends over itself alone, all sequences at once: nothing is before it or padding in it, and
  /// its scores are neither capped nor beside sinks. False: it must be taken in parts.
  virtual bool attend_alone() = 0;
  /// Zeros in the output: rows of padding are not written.
  virtual void clear() = 0;
  /// A part from the chunk's token `begin` on, which has attended those tokens causally.
  virtual std::unique_ptr<ExactPart> part(int64_t part, int64_t begin) = 0;
  /// All parts are written.
  virtual Status finish() { return Status::ok(); }
};

/// What exact chunks are computed with. Stateless; any thread.
class ExactAttention {
 public:
  virtual ~ExactAttention() = default;
  virtual Result<std::unique_ptr<ExactChunk>> begin(Engine& engine,
                                                    const ExactArgs& args) const = 0;
};

/// The CPU's kernels: parts in fp32, sinks last. On a device the chunk is copied to the host, and
/// its answer back.
std::shared_ptr<ExactAttention> host_exact_attention();

/// The one exact walk: every part of the chunk attends causally over itself and over everything
/// before it, which streams through in blocks; then the engine hears of it, in the order that it
/// expects. own.keys null: the chunk is appended, and read back.
Status attend_exactly(Engine& engine, const ExactArgs& args, const ExactAttention& how);

}  // namespace kvswap
