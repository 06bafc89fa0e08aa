#include "methods/summary.h"

#include <algorithm>
#include <string>

#include "kernels/low_rank_score.h"

namespace kvswap {

int64_t Summary::Shape::chunk_bytes() const {
  const int64_t scales = dtype == DType::kInt8 ? chunk_tokens * int64_t{sizeof(float)} : 0;
  return chunk_tokens * rank * dtype_bytes(dtype) + scales;
}

std::shared_ptr<Summary::Chunk> Summary::make_chunk() const {
  auto chunk = std::allocate_shared<Chunk>(NodeAllocator<Chunk>(memory_));
  chunk->memory_ = memory_->allocate(shape_.chunk_bytes());
  if (chunk->memory_ == nullptr) return nullptr;
  const int64_t row_bytes = shape_.chunk_tokens * shape_.rank * dtype_bytes(shape_.dtype);
  chunk->rows = {chunk->memory_.get(), static_cast<size_t>(row_bytes)};
  if (shape_.dtype == DType::kInt8) {
    chunk->token_scale = {reinterpret_cast<float*>(chunk->memory_.get() + row_bytes),
                          static_cast<size_t>(shape_.chunk_tokens)};
  }
  return chunk;
}

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

Status Summary::append(int64_t tokens,
                       const std::function<void(Chunk&, int64_t, int64_t, int64_t)>& write) {
  int64_t token = 0;
  while (token < tokens) {
    const int64_t row = rows_ % shape_.chunk_tokens;
    if (row == 0 || chunks_.back().use_count() > 1) {
      auto chunk = make_chunk();
      if (chunk == nullptr) {
        return Status::budget("summary: " + std::to_string(shape_.chunk_bytes()) +
                              " bytes of memory must be available for the next tokens, and are "
                              "not; lower rank, the context or the batch");
      }
      if (row == 0) {
        chunks_.push_back(std::move(chunk));
      } else {
        memory_->copy(chunk->memory_.get(), chunks_.back()->memory_.get(), shape_.chunk_bytes());
        chunks_.back() = std::move(chunk);
      }
    }
    const int64_t count = std::min(tokens - token, shape_.chunk_tokens - row);
    write(*chunks_.back(), row, token, count);
    token += count;
    rows_ += count;
  }
  return Status::ok();
}

void Summary::truncate(int64_t rows) {
  KVSWAP_ASSERT(rows <= rows_);
  rows_ = rows;
  chunks_.resize((rows + shape_.chunk_tokens - 1) / shape_.chunk_tokens);
}

}  // namespace kvswap
