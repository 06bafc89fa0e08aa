#include "kvswap/saved_state.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>
#include <vector>

#include "io/file_bytes.h"
#include "kvswap/engine_calls.h"
#include "kvswap/errors.h"
#include "store/checksum.h"

namespace kvswap {
namespace {

std::string words(const std::string& dtype, std::span<const int64_t> shape) {
  std::string text = dtype + " [";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace

SavedState::SavedState(int fd, int64_t size_bytes, std::string name)
    : fd_(fd), size_bytes_(size_bytes), name_(std::move(name)) {
  try {
    std::array<std::byte, kSafetensorsLengthBytes> first{};
    const auto known = std::min<int64_t>(size_bytes, kSafetensorsLengthBytes);
    throw_status(read_exactly(fd_, 0, std::span(first).first(known), name_));
    const int64_t length = safetensors_header_bytes(std::span(first).first(known), size_bytes);
    std::string text(length, '\0');
    throw_status(
        read_exactly(fd_, kSafetensorsLengthBytes, std::as_writable_bytes(std::span(text)), name_));
    header_ = read_safetensors_header(text, size_bytes);
  } catch (const ConfigError& error) {
    throw SessionError(SessionError::Kind::kCorrupt,
                       "open: " + name_ + " is damaged: " + error.what() + "; save the cache again",
                       EIO, name_);
  }
}

bool SavedState::has(const std::string& name) const { return header_.tensors.contains(name); }

Result<SavedBytes> SavedState::get(const std::string& name, const std::string& dtype,
                                   std::span<const int64_t> shape) const {
  const auto found = header_.tensors.find(name);
  if (found == header_.tensors.end()) return refuse(name, "be there");
  const SafetensorsEntry& tensor = found->second;
  if (tensor.dtype != dtype || !std::ranges::equal(tensor.shape, shape)) {
    return refuse(name,
                  "be " + words(dtype, shape) + ", and is " + words(tensor.dtype, tensor.shape));
  }
  return read(tensor);
}

Result<SavedBytes> SavedState::read(const SafetensorsEntry& tensor) const {
  auto bytes = FileBytes::read(fd_, {tensor.offset_bytes, tensor.length_bytes}, name_);
  if (!bytes.is_ok()) return bytes.status();
  const auto owner = std::make_shared<const FileBytes>(std::move(bytes.value()));
  return SavedBytes(owner->bytes(), owner);
}

Status SavedState::refuse(const std::string& name, const std::string& must) const {
  return Status::corrupt(
      "open: " + name_ + " is damaged: " + name + " must " + must + "; save the cache again",
      name_);
}

Result<uint64_t> SavedState::checksum() const {
  constexpr int64_t kPieceBytes = 1 << 20;
  RunningChecksum sum;
  std::vector<std::byte> piece(std::min(size_bytes_, kPieceBytes));
  for (int64_t done = 0; done < size_bytes_;) {
    const std::span target =
        std::span(piece).first(std::min<int64_t>(kPieceBytes, size_bytes_ - done));
    KVSWAP_RETURN_IF_ERROR(read_exactly(fd_, done, target, name_));
    sum.add(target);
    done += static_cast<int64_t>(target.size());
  }
  return sum.value();
}

}  // namespace kvswap
