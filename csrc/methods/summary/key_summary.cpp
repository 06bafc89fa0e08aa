#include "methods/summary/key_summary.h"

#include <algorithm>
#include <string>

namespace kvswap {

namespace {

// A chunk in use grows by at least this, so that it moves seldom. Also an alignment of its scales.
constexpr int64_t kRoomTokens = 128;
constexpr int64_t kMemoryPage = 4096;  // memory is given out in pages: what is left over is used

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

int64_t KeySummary::Shape::token_bytes() const {
  return row_bytes(dtype, rank) + (has_row_scales(dtype) ? int64_t{sizeof(float)} : 0);
}

int64_t KeySummary::Shape::room(int64_t rows) const {
  const int64_t asked = std::min(chunk_tokens, round_up(rows, kRoomTokens));
  const int64_t fitting = chunk_bytes(asked) / token_bytes() / kRoomTokens * kRoomTokens;
  return std::min(chunk_tokens, std::max(asked, fitting));
}

int64_t KeySummary::Shape::chunk_bytes(int64_t room) const {
  return round_up(room * token_bytes(), kMemoryPage);
}

int64_t KeySummary::Shape::bytes(int64_t rows) const {
  const int64_t rest = rows % chunk_tokens;
  const int64_t of_last = rest == 0 ? 0 : chunk_bytes(room(rest));
  return rows / chunk_tokens * chunk_bytes(chunk_tokens) + of_last;
}

std::shared_ptr<KeySummary::Chunk> KeySummary::make_chunk(int64_t room) const {
  auto chunk = std::allocate_shared<Chunk>(NodeAllocator<Chunk>(memory_));
  const int64_t of_chunk = shape_.chunk_bytes(room);
  chunk->memory_ = room == shape_.chunk_tokens ? memory_->allocate_packed(of_chunk)
                                               : memory_->allocate(of_chunk);
  if (chunk->memory_ == nullptr) return nullptr;
  const int64_t bytes = room * row_bytes(shape_.dtype, shape_.rank);
  const int64_t rest_bytes = room * row_bytes(shape_.dtype, shape_.rest_columns());
  chunk->room = room;
  chunk->rows = {chunk->memory_.get(), static_cast<size_t>(bytes - rest_bytes)};
  chunk->rest = {chunk->memory_.get() + bytes - rest_bytes, static_cast<size_t>(rest_bytes)};
  if (has_row_scales(shape_.dtype)) {
    chunk->token_scale = {reinterpret_cast<float*>(chunk->memory_.get() + bytes),
                          static_cast<size_t>(room)};
  }
  return chunk;
}

int64_t KeySummary::chunk_rows(int64_t index) const {
  return std::min(shape_.chunk_tokens, rows_ - index * shape_.chunk_tokens);
}

int64_t KeySummary::bytes_to_append(int64_t tokens, std::set<const Chunk*>* settled) const {
  if (tokens == 0) return 0;
  const int64_t begun = rows_ % shape_.chunk_tokens;
  int64_t bytes = shape_.bytes(begun + tokens);
  if (begun > 0 && settled->insert(chunks_.back().get()).second) {
    const int64_t rows = std::min(shape_.chunk_tokens, begun + tokens);
    const int64_t room = chunks_.back()->room;
    bytes -= shape_.chunk_bytes(room < rows ? room : shape_.room(rows));
  }
  return bytes;
}

Status KeySummary::own_last_chunk(int64_t rows) {
  const int64_t begun = rows_ % shape_.chunk_tokens;
  if (begun > 0 && chunks_.back().use_count() == 1 && !chunks_.back()->is_fixed_ &&
      chunks_.back()->room >= rows) {
    return Status::ok();
  }
  // Who leaves a chunk last takes one as large: that is what bytes_to_append() counts it for.
  const bool is_last = begun > 0 && chunks_.back().use_count() == 1;
  const int64_t room = std::max(shape_.room(rows), is_last ? chunks_.back()->room : 0);
  auto chunk = make_chunk(room);
  if (chunk == nullptr) {
    return Status::budget("summary: " + std::to_string(shape_.chunk_bytes(room)) +
                          " bytes of memory must be available for the next tokens, and are not; "
                          "lower summary.rank, the context or the batch");
  }
  if (begun == 0) {
    chunks_.push_back(std::move(chunk));
    return Status::ok();
  }
  copy_rows(*chunk, *chunks_.back(), begun);
  chunks_.back() = std::move(chunk);
  return Status::ok();
}

void KeySummary::copy_rows(Chunk& to, const Chunk& from, int64_t rows) const {
  const int64_t retained = round_up(rows, kSummaryBlock);
  const int64_t rest = shape_.rest_columns();
  memory_->copy(to.rows.data(), from.rows.data(),
                retained / kSummaryBlock * block_bytes(shape_.rank - rest));
  if (rest > 0) {
    memory_->copy(to.rest.data(), from.rest.data(), retained / kSummaryBlock * block_bytes(rest));
  }
  if (from.token_scale.empty()) return;
  memory_->copy(reinterpret_cast<std::byte*>(to.token_scale.data()),
                reinterpret_cast<const std::byte*>(from.token_scale.data()),
                retained * int64_t{sizeof(float)});
}

int64_t KeySummary::bytes_to_own(int64_t row) const {
  const int64_t index = row / shape_.chunk_tokens;
  return is_own(index) ? 0 : bytes_of(*chunks_[index]);
}

Result<KeySummary::Chunk*> KeySummary::own_chunk_of(int64_t row) {
  KVSWAP_ASSERT(row >= 0 && row < rows_);
  const int64_t index = row / shape_.chunk_tokens;
  if (!is_own(index)) {
    auto chunk = make_chunk(chunks_[index]->room);
    if (chunk == nullptr) {
      return Status::budget("summary: " + std::to_string(bytes_of(*chunks_[index])) +
                            " bytes of memory must be available for a sequence of its own, and "
                            "are not; lower the context or the batch");
    }
    copy_rows(*chunk, *chunks_[index], chunk_rows(index));
    chunks_[index] = std::move(chunk);
  }
  return chunks_[index].get();
}

Status KeySummary::append(int64_t tokens,
                          const std::function<void(Chunk&, int64_t, int64_t, int64_t)>& write) {
  int64_t token = 0;
  while (token < tokens) {
    const int64_t row = rows_ % shape_.chunk_tokens;
    const int64_t count = std::min(tokens - token, shape_.chunk_tokens - row);
    KVSWAP_RETURN_IF_ERROR(own_last_chunk(row + count));
    write(*chunks_.back(), row, token, count);
    token += count;
    rows_ += count;
  }
  return Status::ok();
}

Result<std::shared_ptr<KeySummary::Chunk>> KeySummary::load_chunk(
    int64_t rows, std::span<const std::byte> saved_rows,
    std::span<const std::byte> saved_scales) const {
  const int64_t room = shape_.room(rows);
  auto chunk = make_chunk(room);
  if (chunk == nullptr) {
    return Status::budget("summary: " + std::to_string(shape_.chunk_bytes(room)) +
                          " bytes of memory must be available for what was saved, and are not");
  }
  KVSWAP_ASSERT(saved_rows.size() <= chunk->rows.size() + chunk->rest.size() &&
                saved_scales.size() <= chunk->token_scale.size_bytes());
  upload_blocks(*chunk, saved_rows);
  if (!saved_scales.empty()) {
    memory_->upload(reinterpret_cast<std::byte*>(chunk->token_scale.data()), saved_scales.data(),
                    static_cast<int64_t>(saved_scales.size()));
  }
  return chunk;
}

void KeySummary::upload_blocks(Chunk& chunk, std::span<const std::byte> saved) const {
  const auto bytes = static_cast<int64_t>(saved.size());
  const int64_t rest = block_bytes(shape_.rest_columns());
  if (rest == 0) return memory_->upload(chunk.rows.data(), saved.data(), bytes);
  const int64_t first = block_bytes(shape_.first_columns);
  for (int64_t block = 0; block < bytes / (first + rest); ++block) {
    const std::byte* from = saved.data() + block * (first + rest);
    memory_->upload(chunk.rows.data() + block * first, from, first);
    memory_->upload(chunk.rest.data() + block * rest, from + first, rest);
  }
}

Status KeySummary::download_blocks(const Chunk& chunk, int64_t first, int64_t count,
                                   std::byte* host) const {
  const int64_t rest = block_bytes(shape_.rest_columns());
  const int64_t own = block_bytes(shape_.rank) - rest;
  if (rest == 0) return download(host, chunk.rows.data() + first * own, count * own);
  for (int64_t block = first; block < first + count; ++block) {
    KVSWAP_RETURN_IF_ERROR(download(host, chunk.rows.data() + block * own, own));
    KVSWAP_RETURN_IF_ERROR(download(host + own, chunk.rest.data() + block * rest, rest));
    host += own + rest;
  }
  return Status::ok();
}

std::shared_ptr<KeySummary::Chunk> KeySummary::share_chunk(Chunk& other) const {
  other.is_fixed_ = true;
  auto chunk = std::allocate_shared<Chunk>(NodeAllocator<Chunk>(memory_), other);
  chunk->memory_ = memory_->share(other.memory_);
  return chunk;
}

void KeySummary::take(std::vector<std::shared_ptr<Chunk>> chunks, int64_t rows) {
  KVSWAP_ASSERT(rows_ == 0 && static_cast<int64_t>(chunks.size()) ==
                                  (rows + shape_.chunk_tokens - 1) / shape_.chunk_tokens);
  chunks_ = std::move(chunks);
  rows_ = rows;
}

void KeySummary::truncate(int64_t rows) {
  KVSWAP_ASSERT(rows <= rows_);
  rows_ = rows;
  chunks_.resize((rows + shape_.chunk_tokens - 1) / shape_.chunk_tokens);
}

}  // namespace kvswap
