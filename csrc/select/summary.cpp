#include "select/summary.h"

#include <algorithm>

#include "kernels/low_rank_score.h"

namespace kvswap {

int64_t Summary::Shape::chunk_bytes() const {
  const int64_t scales = dtype == DType::kInt8 ? chunk_tokens * int64_t{sizeof(float)} : 0;
  return chunk_tokens * rank * dtype_bytes(dtype) + scales;
}

Summary::Chunk::Chunk(const Shape& shape, std::shared_ptr<std::atomic<int64_t>> live_bytes)
    : rows(shape.chunk_tokens * shape.rank * dtype_bytes(shape.dtype)),
      token_scale(shape.dtype == DType::kInt8 ? shape.chunk_tokens : 0),
      bytes_(shape.chunk_bytes()),
      live_bytes_(std::move(live_bytes)) {
  *live_bytes_ += bytes_;
}

Summary::Chunk::Chunk(const Chunk& other)
    : rows(other.rows),
      token_scale(other.token_scale),
      bytes_(other.bytes_),
      live_bytes_(other.live_bytes_) {
  *live_bytes_ += bytes_;
}

Summary::Chunk::~Chunk() { *live_bytes_ -= bytes_; }

int64_t Summary::chunk_rows(int64_t index) const {
  return std::min(shape_.chunk_tokens, rows_ - index * shape_.chunk_tokens);
}

int64_t Summary::chunks_to_append(int64_t tokens) const {
  if (tokens == 0) return 0;
  const int64_t needed = (rows_ + tokens + shape_.chunk_tokens - 1) / shape_.chunk_tokens;
  return needed - chunks() + (copies_to_append(tokens) ? 1 : 0);
}

bool Summary::copies_to_append(int64_t tokens) const {
  return tokens > 0 && rows_ % shape_.chunk_tokens != 0 && chunks_.back().use_count() > 1;
}

void Summary::append(int64_t tokens,
                     const std::function<void(Chunk&, int64_t, int64_t, int64_t)>& write) {
  int64_t token = 0;
  while (token < tokens) {
    const int64_t row = rows_ % shape_.chunk_tokens;
    if (row == 0) {
      chunks_.push_back(std::make_shared<Chunk>(shape_, live_bytes_));
    } else if (chunks_.back().use_count() > 1) {
      chunks_.back() = std::make_shared<Chunk>(*chunks_.back());
    }
    const int64_t count = std::min(tokens - token, shape_.chunk_tokens - row);
    write(*chunks_.back(), row, token, count);
    token += count;
    rows_ += count;
  }
}

void Summary::truncate(int64_t rows) {
  KVSWAP_ASSERT(rows <= rows_);
  rows_ = rows;
  chunks_.resize((rows + shape_.chunk_tokens - 1) / shape_.chunk_tokens);
}

}  // namespace kvswap
