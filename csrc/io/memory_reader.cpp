#include <cerrno>
#include <span>
#include <string>

#include "io/batch_reader.h"
#include "io/memory_file.h"
#include "io/reader_backends.h"

namespace kvswap {
namespace {

/// Copies within submit(). Nothing comes from a disk, and nothing is counted as if it did.
class MemoryReader final : public BatchReader {
 public:
  explicit MemoryReader(const DataFile& file) : BatchReader(file, {}) {}

  Result<Ticket> submit(std::span<const BlockRead> reads) override {
    KVSWAP_RETURN_IF_ERROR(check_reads(file_, reads));
    ReadBatch& batch = batches_.add({});
    for (const BlockRead& read : reads) {
      int64_t offset = read.offset_bytes;
      for (const iovec& target : read.targets) {
        const std::span<std::byte> bytes = {static_cast<std::byte*>(target.iov_base),
                                            target.iov_len};
        if (!file_.memory()->read(offset, bytes)) batch.fail(missing(offset, bytes.size()));
        offset += static_cast<int64_t>(target.iov_len);
      }
    }
    batch.is_done = true;
    return batch.ticket;
  }

  std::string name() const override { return "memory"; }

 private:
  static Status missing(int64_t offset_bytes, size_t length_bytes) {
    return Status::storage("memory: " + std::to_string(length_bytes) + " bytes at offset " +
                               std::to_string(offset_bytes) + " must be held, and are not",
                           EIO);
  }
};

}  // namespace

std::unique_ptr<BlockReader> make_memory_reader(const DataFile& file) {
  return std::make_unique<MemoryReader>(file);
}

}  // namespace kvswap
