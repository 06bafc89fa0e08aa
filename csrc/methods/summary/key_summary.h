#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "io/status.h"
#include "kernels/low_rank_score.h"
#include "kernels/types.h"
#include "methods/summary/summary_memory.h"

namespace kvswap {

/// Low-rank rows of one layer and one sequence, in chunks of blocks (`[blocks, rank, 16]`). Where
/// most rows are read in their first columns alone, these stand together in a chunk, before those
/// of the rest: what is skipped between them would cost as much as what is read.
///
/// All chunks but the last are full; the last has room for what is there and little more, and moves
/// to a larger place when it must grow, so that memory follows the context. Chunks are shared
/// between sequences that share a past: a copy of a KeySummary costs pointers, and the first append
/// to a shared last chunk copies that chunk alone. Those of another cache, which goes on by itself,
/// are shared in the same way, and stay as they are for good. Not thread-safe.
class KeySummary {
 public:
  struct Shape {
    int64_t rank = 0;
    int64_t chunk_tokens = 0;  // a multiple of 16
    DType dtype = DType::kFloat32;
    int64_t first_columns = 0;  // that stand apart from the rest; 0: all together, as with int4
    int64_t rest_columns() const { return first_columns > 0 ? rank - first_columns : 0; }
    /// Tokens that a chunk has room for which holds `rows`, at most chunk_tokens.
    int64_t room(int64_t rows) const;
    /// Bytes of a chunk with such a room: whole memory pages.
    int64_t chunk_bytes(int64_t room) const;
    /// Bytes of all chunks that hold `rows`.
    int64_t bytes(int64_t rows) const;
    /// The most that is held beside them, while a chunk moves.
    int64_t moving_bytes() const { return chunk_bytes(chunk_tokens); }

   private:
    int64_t token_bytes() const;
  };
  /// Counted by its memory while it lives.
  struct Chunk {
    std::span<std::byte> rows;     // [blocks, rank - rest_columns, 16] of dtype; int4: see
                                   // UnpackInt4Args
    std::span<std::byte> rest;     // [blocks, rest_columns, 16]
    std::span<float> token_scale;  // [blocks, 16]: int8 and int4 only
    int64_t room = 0;              // 16 * blocks

   private:
    friend class KeySummary;
    std::shared_ptr<std::byte> memory_;
    bool is_fixed_ = false;  // another memory holds it too, or has
  };

  KeySummary(const Shape& shape, std::shared_ptr<SummaryMemory> memory)
      : shape_(shape), memory_(std::move(memory)) {}

  int64_t rows() const { return rows_; }
  const Shape& shape() const { return shape_; }
  int64_t chunks() const { return static_cast<int64_t>(chunks_.size()); }
  const Chunk& chunk(int64_t index) const { return *chunks_[index]; }
  Chunk& chunk(int64_t index) { return *chunks_[index]; }
  /// Rows of chunk `index` in use.
  int64_t chunk_rows(int64_t index) const;

  /// Bytes that `tokens` more rows take, where everyone who shares the last chunk gets as many.
  /// `settled`: last chunks that somebody is counted for already who stays in or frees them.
  int64_t bytes_to_append(int64_t tokens, std::set<const Chunk*>* settled) const;
  /// Calls write(chunk, first_row, first_token, count) for each piece of the `tokens` new rows.
  /// Fails where there is no memory for a chunk; the rows before it are there.
  Status append(int64_t tokens,
                const std::function<void(Chunk&, int64_t first_row, int64_t first_token,
                                         int64_t count)>& write);
  /// The chunk of a row that is there, the sequence's own from now on.
  Result<Chunk*> own_chunk_of(int64_t row);
  /// Bytes that it would allocate.
  int64_t bytes_to_own(int64_t row) const;
  void truncate(int64_t rows);

  /// A chunk of `rows` rows that was saved, already checked.
  Result<std::shared_ptr<Chunk>> load_chunk(int64_t rows, std::span<const std::byte> saved_rows,
                                            std::span<const std::byte> saved_scales) const;
  /// A chunk of another summary of this shape, which neither changes from now on.
  std::shared_ptr<Chunk> share_chunk(Chunk& other) const;
  /// Of its memory.
  int64_t bytes_of(const Chunk& chunk) const { return shape_.chunk_bytes(chunk.room); }
  /// Chunks that load_chunk() or share_chunk() made, of `rows` rows together; perhaps shared with
  /// others.
  void take(std::vector<std::shared_ptr<Chunk>> chunks, int64_t rows);
  /// Copies `count` blocks of a chunk to the host, all their columns together.
  Status download_blocks(const Chunk& chunk, int64_t first, int64_t count, std::byte* host) const;
  /// Copies `bytes` of a chunk's scales to the host.
  Status download(void* host, const void* from, int64_t bytes) const {
    return memory_->download(host, static_cast<const std::byte*>(from), bytes);
  }

 private:
  std::shared_ptr<Chunk> make_chunk(int64_t room) const;
  void upload_blocks(Chunk& chunk, std::span<const std::byte> saved) const;
  int64_t block_bytes(int64_t columns) const {
    return kSummaryBlock * row_bytes(shape_.dtype, columns);
  }
  bool is_own(int64_t index) const {
    return chunks_[index].use_count() == 1 && !chunks_[index]->is_fixed_;
  }
  void copy_rows(Chunk& to, const Chunk& from, int64_t rows) const;
  /// The last chunk, with room for `rows` and nobody else's.
  Status own_last_chunk(int64_t rows);

  Shape shape_;
  std::shared_ptr<SummaryMemory> memory_;
  int64_t rows_ = 0;
  std::vector<std::shared_ptr<Chunk>> chunks_;
};

}  // namespace kvswap
