// Summaries as tensors of a saved session.

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "kernels/low_rank_score.h"
#include "methods/summary/summary_store.h"

namespace kvswap {
namespace {

std::string summary_name(int64_t layer) { return "layers." + std::to_string(layer) + ".summary"; }

const char* stored_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "F32";
    case DType::kBFloat16:
      return "BF16";
    case DType::kFloat16:
      return "F16";
    case DType::kInt8:
      return "I8";
    case DType::kInt4:  // a byte holds two columns
      return "U8";
  }
  return "";
}

/// Columns as they are stored, of dtype `stored_dtype`.
int64_t stored_columns(const KeySummary::Shape& shape) {
  return row_bytes(shape.dtype, shape.rank) / dtype_bytes(shape.dtype);
}

int64_t blocks_of(int64_t rows) { return (rows + kSummaryBlock - 1) / kSummaryBlock; }

/// A chunk in a saved session: the place it has in each sequence that shares it.
struct SavedChunk {
  int64_t place = 0;
  int64_t rows = 0;
};

/// Which chunks the sequences of a layer are made of.
struct SavedLayer {
  std::vector<std::vector<uint32_t>> numbers;  // [sequences][chunks]
  std::map<uint32_t, SavedChunk> chunks;
};

Result<SavedLayer> read_layer(int64_t layer, int64_t sequences, int64_t rows,
                              const KeySummary::Shape& shape, const SavedTensors& saved) {
  const int64_t chunks = (rows + shape.chunk_tokens - 1) / shape.chunk_tokens;
  const std::string name = summary_name(layer);
  const int64_t sizes[] = {sequences, chunks};
  auto found = saved.get(name, "U32", sizes);
  if (!found.is_ok()) return found.status();
  const std::byte* bytes = found.value().data();
  SavedLayer read;
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    std::vector<uint32_t>& numbers = read.numbers.emplace_back(chunks);
    if (chunks > 0) std::memcpy(numbers.data(), bytes, chunks * sizeof(uint32_t));
    bytes += chunks * sizeof(uint32_t);
    for (int64_t place = 0; place < chunks; ++place) {
      const SavedChunk chunk = {place,
                                std::min(shape.chunk_tokens, rows - place * shape.chunk_tokens)};
      const auto [known, is_new] = read.chunks.emplace(numbers[place], chunk);
      if (!is_new && known->second.place != place) {
        return saved.refuse(name, "have each chunk in one place alone");
      }
    }
  }
  return read;
}

}  // namespace

void SummaryStore::list(int64_t layer, std::vector<SavedTensor>& tensors) const {
  if (!is_ready(layer) || tokens(layer) == 0) return;
  const KeySummary::Shape shape = this->shape(layer);
  const std::string name = summary_name(layer);
  std::map<const KeySummary::Chunk*, uint32_t> numbers;
  std::vector<std::vector<uint32_t>> of_sequences;
  for (const KeySummary& summary : summaries_[layer]) {
    std::vector<uint32_t>& of_sequence = of_sequences.emplace_back();
    for (int64_t i = 0; i < summary.chunks(); ++i) {
      const KeySummary::Chunk& chunk = summary.chunk(i);
      const auto [known, is_new] = numbers.emplace(&chunk, static_cast<uint32_t>(numbers.size()));
      of_sequence.push_back(known->second);
      if (!is_new) continue;
      const std::string of_chunk = name + "." + std::to_string(known->second);
      const int64_t blocks = blocks_of(summary.chunk_rows(i));
      tensors.push_back({of_chunk + ".rows",
                         stored_dtype(shape.dtype),
                         {blocks, stored_columns(shape), kSummaryBlock},
                         kSummaryBlock * row_bytes(shape.dtype, shape.rank),
                         [&summary, &chunk](int64_t first, int64_t count, std::byte* target) {
                           return summary.download_blocks(chunk, first, count, target);
                         }});
      if (chunk.token_scale.empty()) continue;
      tensors.push_back({of_chunk + ".scales",
                         "F32",
                         {blocks, kSummaryBlock},
                         kSummaryBlock * int64_t{sizeof(float)},
                         [&summary, &chunk](int64_t first, int64_t count, std::byte* target) {
                           const float* from = chunk.token_scale.data() + first * kSummaryBlock;
                           return summary.download(target, from,
                                                   count * kSummaryBlock * int64_t{sizeof(float)});
                         }});
    }
  }
  const auto chunks = static_cast<int64_t>(of_sequences.front().size());
  const int64_t row_bytes = chunks * int64_t{sizeof(uint32_t)};
  tensors.push_back({name,
                     "U32",
                     {sequences_, chunks},
                     row_bytes,
                     [of_sequences, row_bytes](int64_t first, int64_t count, std::byte* target) {
                       for (int64_t i = 0; i < count; ++i) {
                         std::memcpy(target + i * row_bytes, of_sequences[first + i].data(),
                                     row_bytes);
                       }
                       return Status::ok();
                     }});
}

Result<int64_t> SummaryStore::bytes_to_load(int64_t layer, int64_t tokens,
                                            const SavedTensors& saved) const {
  if (!is_ready(layer) || tokens == 0 || rows_.shape(layer).width == 0) return int64_t{0};
  const KeySummary::Shape shape = this->shape(layer);
  auto read =
      read_layer(layer, sequences_, tokens / rows_.shape(layer).tokens_per_row, shape, saved);
  if (!read.is_ok()) return read.status();
  int64_t bytes = 0;
  for (const auto& [number, chunk] : read.value().chunks) {
    bytes += shape.chunk_bytes(shape.room(chunk.rows));
  }
  return bytes;
}

Status SummaryStore::load(int64_t layer, int64_t tokens, const SavedTensors& saved) {
  if (!is_ready(layer) || tokens == 0 || rows_.shape(layer).width == 0) return Status::ok();
  const KeySummary::Shape shape = this->shape(layer);
  const int64_t rows = tokens / rows_.shape(layer).tokens_per_row;
  auto read = read_layer(layer, sequences_, rows, shape, saved);
  if (!read.is_ok()) return read.status();
  const KeySummary& maker = summaries_[layer].front();
  std::map<uint32_t, std::shared_ptr<KeySummary::Chunk>> loaded;
  for (const auto& [number, chunk] : read.value().chunks) {
    const std::string name = summary_name(layer) + "." + std::to_string(number);
    const int64_t sizes[] = {blocks_of(chunk.rows), stored_columns(shape), kSummaryBlock};
    auto of_rows = saved.get(name + ".rows", stored_dtype(shape.dtype), sizes);
    if (!of_rows.is_ok()) return of_rows.status();
    SavedBytes of_scales;
    if (has_row_scales(shape.dtype)) {
      const int64_t scale_sizes[] = {blocks_of(chunk.rows), kSummaryBlock};
      auto scales = saved.get(name + ".scales", "F32", scale_sizes);
      if (!scales.is_ok()) return scales.status();
      of_scales = scales.value();
    }
    auto made = maker.load_chunk(chunk.rows, of_rows.value(), of_scales);
    if (!made.is_ok()) return made.status();
    loaded[number] = std::move(made.value());
  }
  for (int64_t sequence = 0; sequence < sequences_; ++sequence) {
    std::vector<std::shared_ptr<KeySummary::Chunk>> chunks;
    for (const uint32_t number : read.value().numbers[sequence]) chunks.push_back(loaded[number]);
    summaries_[layer][sequence].take(std::move(chunks), rows);
  }
  return Status::ok();
}

}  // namespace kvswap
