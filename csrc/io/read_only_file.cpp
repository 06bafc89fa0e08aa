#include "io/read_only_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <utility>
#include <vector>

namespace kvswap {
namespace {

constexpr int64_t kSmallestAlignment = 512;
constexpr int64_t kUnknownAlignment = 4096;  // every device and file system in use takes this

class ReadOnlyFile final : public DataFile {
 public:
  ReadOnlyFile(OwnedFd fd, std::string directory, int64_t alignment_bytes)
      : fd_(std::move(fd)), directory_(std::move(directory)), alignment_bytes_(alignment_bytes) {}

  int fd() const override { return fd_.get(); }
  bool is_direct() const override { return alignment_bytes_ > 0; }
  int64_t alignment_bytes() const override {
    return std::max(alignment_bytes_, kSmallestAlignment);
  }
  const std::string& directory() const override { return directory_; }
  const std::vector<std::string>& fallbacks() const override { return fallbacks_; }
  Status reserve(int64_t) override { return refused(); }
  Status write(int64_t, std::span<const std::byte>) override { return refused(); }
  Status shrink(int64_t) override { return refused(); }
  int64_t allocated_bytes() const override { return 0; }
  void drop_cached(int64_t offset_bytes, int64_t length_bytes) override {
    if (!is_direct()) {
      (void)::posix_fadvise(fd_.get(), offset_bytes, length_bytes, POSIX_FADV_DONTNEED);
    }
  }
  void keep() override {}

 private:
  Status refused() const {
    return Status::storage("DataFile: a saved cache is only read, in '" + directory_ + "'", EROFS,
                           directory_);
  }

  OwnedFd fd_;
  std::string directory_;
  int64_t alignment_bytes_;  // 0: not O_DIRECT
  std::vector<std::string> fallbacks_;
};

}  // namespace

int64_t direct_alignment(int fd) {
#if defined(STATX_DIOALIGN)
  struct statx facts{};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &facts) == 0 &&
      (facts.stx_mask & STATX_DIOALIGN) != 0) {
    if (facts.stx_dio_offset_align == 0) return 0;
    const int64_t asked = std::max(facts.stx_dio_mem_align, facts.stx_dio_offset_align);
    return std::max(kSmallestAlignment,
                    static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(asked))));
  }
#else
  (void)fd;
#endif
  return kUnknownAlignment;
}

std::unique_ptr<DataFile> make_read_only_file(OwnedFd fd, const ReadOnlyOptions& options) {
  int64_t alignment = options.wants_direct ? direct_alignment(fd.get()) : 0;
  if (alignment == 0 || options.unit_bytes % alignment != 0) alignment = 0;
  const int flags = ::fcntl(fd.get(), F_GETFL);
  if (alignment > 0 && ::fcntl(fd.get(), F_SETFL, flags | O_DIRECT) != 0) alignment = 0;
  // Selected groups lie scattered: read-ahead would fetch what nobody asked for.
  if (alignment == 0) (void)::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_RANDOM);
  return std::make_unique<ReadOnlyFile>(std::move(fd), options.directory, alignment);
}

}  // namespace kvswap
