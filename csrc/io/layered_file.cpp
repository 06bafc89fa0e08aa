#include "io/layered_file.h"

#include <utility>

namespace kvswap {

LayeredFile::LayeredFile(std::vector<Part> below, std::shared_ptr<DataFile> own,
                         int64_t own_begin_bytes) {
  KVSWAP_ASSERT(below.size() < kFilesMax);
  int count = 0;
  for (Part& part : below) parts_[count++] = std::move(part);
  parts_[count++] = {std::move(own), own_begin_bytes};
  count_ = count;
}

int64_t LayeredFile::begin_above(int64_t end_bytes, int64_t record_bytes) {
  const int64_t begin = end_bytes == 0 ? 0 : end_bytes + kGapBytes;
  return (begin + record_bytes - 1) / record_bytes * record_bytes;
}

void LayeredFile::seal(std::shared_ptr<DataFile> next, int64_t next_begin_bytes) {
  const int count = count_;
  KVSWAP_ASSERT(count < kFilesMax && next_begin_bytes > own().begin_bytes);
  parts_[count] = {std::move(next), next_begin_bytes};
  count_.store(count + 1, std::memory_order_release);
}

std::vector<LayeredFile::Part> LayeredFile::parts() const {
  return {parts_.begin(), parts_.begin() + count_};
}

const LayeredFile::Part& LayeredFile::part_at(int64_t offset_bytes) const {
  int index = count_.load(std::memory_order_acquire) - 1;
  while (index > 0 && offset_bytes < parts_[index].begin_bytes) --index;
  return parts_[index];
}

FilePlace LayeredFile::place_of(int64_t offset_bytes) const {
  const Part& part = part_at(offset_bytes);
  return part.file->place_of(offset_bytes - part.begin_bytes);
}

Status LayeredFile::reserve(int64_t size_bytes) {
  return own().file->reserve(size_bytes - own_begin_bytes());
}

Status LayeredFile::write(int64_t offset_bytes, std::span<const std::byte> bytes) {
  KVSWAP_ASSERT(offset_bytes >= own_begin_bytes());
  return own().file->write(offset_bytes - own_begin_bytes(), bytes);
}

void LayeredFile::drop_cached(int64_t offset_bytes, int64_t length_bytes) {
  const Part& part = part_at(offset_bytes);
  part.file->drop_cached(offset_bytes - part.begin_bytes, length_bytes);
}

void LayeredFile::discard(int64_t offset_bytes, int64_t length_bytes) {
  KVSWAP_ASSERT(offset_bytes >= own_begin_bytes());
  own().file->discard(offset_bytes - own_begin_bytes(), length_bytes);
}

Status LayeredFile::shrink(int64_t size_bytes) {
  return own().file->shrink(size_bytes - own_begin_bytes());
}

}  // namespace kvswap
