#include "io/memory_file.h"

#include <algorithm>
#include <cstring>

namespace kvswap {

MemoryFile::Piece MemoryFile::first_piece(int64_t offset_bytes, int64_t length_bytes) {
  const int64_t within = offset_bytes % kBlockBytes;
  return {offset_bytes / kBlockBytes, within, std::min(length_bytes, kBlockBytes - within)};
}

Status MemoryFile::reserve(int64_t size_bytes) {
  const int64_t blocks = (size_bytes + kBlockBytes - 1) / kBlockBytes;
  if (blocks > static_cast<int64_t>(blocks_.size())) blocks_.resize(blocks);
  return Status::ok();
}

Status MemoryFile::write(int64_t offset_bytes, std::span<const std::byte> bytes) {
  const auto length = static_cast<int64_t>(bytes.size());
  KVSWAP_ASSERT(offset_bytes % kAlignment == 0 && length % kAlignment == 0);
  KVSWAP_RETURN_IF_ERROR(reserve(offset_bytes + length));
  for (int64_t done = 0; done < length;) {
    const Piece piece = first_piece(offset_bytes + done, length - done);
    Block& block = blocks_[piece.block];
    if (block.memory == nullptr) {
      auto memory = std::make_unique<MappedMemory>(kBlockBytes, is_wiped_);
      if (!memory->is_there()) {
        return Status::budget("session: memory must hold " + std::to_string(length) +
                              " bytes more until it is chosen which tokens stay, but the system "
                              "refused them; free some, or give a path on a disk");
      }
      block.memory = std::move(memory);
      ++blocks_held_;
    }
    std::memcpy(block.memory->data() + piece.offset_bytes, bytes.data() + done, piece.length_bytes);
    for (int64_t at = 0; at < piece.length_bytes; at += kAlignment) {
      block.is_held.set((piece.offset_bytes + at) / kAlignment);
    }
    done += piece.length_bytes;
  }
  return Status::ok();
}

void MemoryFile::discard(int64_t offset_bytes, int64_t length_bytes) {
  KVSWAP_ASSERT(offset_bytes % kAlignment == 0 && length_bytes % kAlignment == 0);
  const int64_t held_bytes = static_cast<int64_t>(blocks_.size()) * kBlockBytes;
  length_bytes = std::min(length_bytes, held_bytes - offset_bytes);
  for (int64_t done = 0; done < length_bytes;) {
    const Piece piece = first_piece(offset_bytes + done, length_bytes - done);
    done += piece.length_bytes;
    Block& block = blocks_[piece.block];
    if (block.memory == nullptr) continue;
    for (int64_t at = 0; at < piece.length_bytes; at += kAlignment) {
      block.is_held.reset((piece.offset_bytes + at) / kAlignment);
    }
    if (block.is_held.any()) continue;
    block.memory.reset();
    --blocks_held_;
  }
}

Status MemoryFile::shrink(int64_t size_bytes) {
  const int64_t held_bytes = static_cast<int64_t>(blocks_.size()) * kBlockBytes;
  if (size_bytes < held_bytes) discard(size_bytes, held_bytes - size_bytes);
  return Status::ok();
}

bool MemoryFile::read(int64_t offset_bytes, std::span<std::byte> target) const {
  const auto length = static_cast<int64_t>(target.size());
  for (int64_t done = 0; done < length;) {
    const Piece piece = first_piece(offset_bytes + done, length - done);
    if (piece.block >= static_cast<int64_t>(blocks_.size())) return false;
    const Block& block = blocks_[piece.block];
    const int64_t first = piece.offset_bytes / kAlignment;
    const int64_t end = (piece.offset_bytes + piece.length_bytes + kAlignment - 1) / kAlignment;
    for (int64_t at = first; at < end; ++at) {
      if (!block.is_held.test(at)) return false;
    }
    std::memcpy(target.data() + done, block.memory->data() + piece.offset_bytes,
                piece.length_bytes);
    done += piece.length_bytes;
  }
  return true;
}

}  // namespace kvswap
