#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/data_file.h"

namespace kvswap {

/// A DataFile that passes every call on; override the calls that a test bends.
class ForwardingFile : public DataFile {
 public:
  explicit ForwardingFile(std::unique_ptr<DataFile> inner) : inner_(std::move(inner)) {}

  int fd() const override { return inner_->fd(); }
  bool is_direct() const override { return inner_->is_direct(); }
  int64_t alignment_bytes() const override { return inner_->alignment_bytes(); }
  const std::string& directory() const override { return inner_->directory(); }
  const std::vector<std::string>& fallbacks() const override { return inner_->fallbacks(); }
  int64_t allocated_bytes() const override { return inner_->allocated_bytes(); }
  void drop_cached(int64_t offset_bytes, int64_t length_bytes) override {
    inner_->drop_cached(offset_bytes, length_bytes);
  }
  void discard(int64_t offset_bytes, int64_t length_bytes) override {
    inner_->discard(offset_bytes, length_bytes);
  }
  Status shrink(int64_t size_bytes) override { return inner_->shrink(size_bytes); }
  void keep() override { inner_->keep(); }
  Status reserve(int64_t size_bytes) override { return inner_->reserve(size_bytes); }
  Status write(int64_t offset_bytes, std::span<const std::byte> bytes) override {
    return inner_->write(offset_bytes, bytes);
  }

 private:
  std::unique_ptr<DataFile> inner_;
};

}  // namespace kvswap
