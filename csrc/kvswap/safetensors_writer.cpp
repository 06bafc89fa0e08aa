#include "kvswap/safetensors_writer.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kvswap/atomic_directory.h"
#include "kvswap/json.h"

namespace kvswap {

#if KVSWAP_HAS_JSON

namespace {

constexpr int64_t kPieceBytes = 1 << 20;

std::string header_of(std::span<const SavedTensor> tensors,
                      const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const SavedTensor& tensor : tensors) {
    header[tensor.name] = {{"dtype", tensor.dtype},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + tensor.bytes()}}};
    offset += tensor.bytes();
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

}  // namespace

Result<int64_t> write_safetensors(int fd, const std::string& path,
                                  std::span<const SavedTensor> tensors,
                                  const std::map<std::string, std::string>& metadata) {
  const std::string text = header_of(tensors, metadata);
  std::vector<std::byte> piece(sizeof(uint64_t) + text.size());
  const uint64_t length = text.size();
  std::memcpy(piece.data(), &length, sizeof(length));
  std::memcpy(piece.data() + sizeof(length), text.data(), text.size());
  int64_t offset = 0;
  const auto write_piece = [&](size_t bytes) {
    const Status written = write_all(fd, path, piece.data(), bytes, offset);
    offset += static_cast<int64_t>(bytes);
    return written;
  };
  KVSWAP_RETURN_IF_ERROR(write_piece(piece.size()));
  for (const SavedTensor& tensor : tensors) {
    if (tensor.bytes() == 0) continue;
    const int64_t rows_max = std::max<int64_t>(1, kPieceBytes / tensor.row_bytes);
    for (int64_t row = 0; row < tensor.shape[0]; row += rows_max) {
      const int64_t rows = std::min(rows_max, tensor.shape[0] - row);
      piece.resize(rows * tensor.row_bytes);
      KVSWAP_RETURN_IF_ERROR(tensor.read(row, rows, piece.data()));
      KVSWAP_RETURN_IF_ERROR(write_piece(piece.size()));
    }
  }
  return offset;
}

#else

Result<int64_t> write_safetensors(int, const std::string& path, std::span<const SavedTensor>,
                                  const std::map<std::string, std::string>&) {
  return Status::invalid("saved cache " + path +
                         ": this kvswap_torch was built without nlohmann-json and cannot save");
}

#endif

}  // namespace kvswap
