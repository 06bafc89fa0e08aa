#include "kvswap/saved_state.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "kvswap/errors.h"

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

SavedState::SavedState(const std::string& path, std::string name) : name_(std::move(name)) {
  try {
    file_ = std::make_unique<SafetensorsFile>(path);
  } catch (const ConfigError& error) {
    throw SessionError(SessionError::Kind::kCorrupt,
                       "open: " + name_ + " is damaged: " + error.what() + "; save the cache again",
                       EIO, name_);
  }
}

bool SavedState::has(const std::string& name) const { return file_->tensors().contains(name); }

Result<std::span<const std::byte>> SavedState::get(const std::string& name,
                                                   const std::string& dtype,
                                                   std::span<const int64_t> shape) const {
  const auto found = file_->tensors().find(name);
  if (found == file_->tensors().end()) return refuse(name, "be there");
  const StoredTensor& tensor = found->second;
  if (tensor.dtype != dtype || !std::ranges::equal(tensor.shape, shape)) {
    return refuse(name,
                  "be " + words(dtype, shape) + ", and is " + words(tensor.dtype, tensor.shape));
  }
  return tensor.bytes;
}

Status SavedState::refuse(const std::string& name, const std::string& must) const {
  return Status::corrupt(
      "open: " + name_ + " is damaged: " + name + " must " + must + "; save the cache again",
      name_);
}

}  // namespace kvswap
