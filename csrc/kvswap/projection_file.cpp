#include "kvswap/projection_file.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "engine/setting_names.h"
#include "kvswap/config_json.h"
#include "kvswap/errors.h"
#include "kvswap/safetensors.h"
#include "kvswap/swap_config.h"

namespace kvswap {
namespace {

constexpr const char* kFormatVersion = "1";

std::vector<float> first_columns(const std::vector<float>& matrix, int64_t rows, int64_t columns,
                                 int64_t rank) {
  std::vector<float> kept(rows * rank);
  for (int64_t row = 0; row < rows; ++row) {
    std::copy_n(matrix.begin() + row * columns, rank, kept.begin() + row * rank);
  }
  return kept;
}

void check_metadata(const std::string& where, const std::map<std::string, std::string>& metadata,
                    const ModelIdentity& model, const std::string& heads) {
  const auto version = metadata.find("kvswap_projection");
  if (version == metadata.end() || version->second != kFormatVersion) {
    throw ConfigError(where + ": metadata kvswap_projection must be " + kFormatVersion + ", got " +
                      (version == metadata.end() ? "none" : version->second) +
                      "; calibrate again with this kvswap_torch");
  }
  const auto found = metadata.find("heads");
  const std::string calibrated_for = found == metadata.end() ? "all" : found->second;
  if (calibrated_for != heads) {
    throw ConfigError(where + ": must be calibrated for selection.heads " +
                      file_word("heads", heads) + ", was for " +
                      file_word("heads", calibrated_for) +
                      "; calibrate for it, or leave summary.projection_file out");
  }
  const auto text = metadata.find("model");
  ModelIdentity written_for;
  try {
    written_for = identity_from_json(text == metadata.end() ? "{}" : text->second);
  } catch (const std::exception& error) {
    throw ConfigError(where + ": metadata model must describe a model: " + error.what());
  }
  const std::string told = differences(written_for, model);
  if (!told.empty()) {
    throw ConfigError(where + ": must be for the model it is used with, but was made for " + told +
                      "; calibrate this model, or leave summary.projection_file out");
  }
}

std::vector<float> read_matrix(const std::string& where, const SafetensorsFile& file,
                               const std::string& name, int64_t rank, int64_t width) {
  const auto found = file.tensors().find(name);
  if (found == file.tensors().end()) {
    throw ConfigError(where + ": must have " + name + ", has only " +
                      std::to_string(file.tensors().size()) + " other tensors");
  }
  const StoredTensor& tensor = found->second;
  const bool is_float = tensor.dtype == "F32" || tensor.dtype == "F16" || tensor.dtype == "BF16" ||
                        tensor.dtype == "F64";
  if (tensor.shape.size() != 2 || tensor.shape[0] != width || tensor.shape[1] < rank || !is_float) {
    std::string shape;
    for (const int64_t size : tensor.shape) shape.append(" ").append(std::to_string(size));
    throw ConfigError(where + ": " + name + " must be floats [" + std::to_string(width) +
                      ", at least " + std::to_string(rank) + "], got " + tensor.dtype + " of" +
                      shape + "; calibrate again, or lower summary.rank");
  }
  std::vector<float> matrix = first_columns(as_floats(tensor), width, tensor.shape[1], rank);
  if (!std::all_of(matrix.begin(), matrix.end(), [](float one) { return std::isfinite(one); })) {
    throw ConfigError(where + ": " + name + " must be finite, has NaN or infinity; restore it");
  }
  return matrix;
}

}  // namespace

Projection Projection::cut(int64_t columns) const {
  if (columns < 1 || columns > rank) {
    throw ConfigError("projection: rank must be 1 to " + std::to_string(rank) + ", got " +
                      std::to_string(columns));
  }
  return {width, columns, first_columns(keys, width, rank, columns),
          first_columns(queries, width, rank, columns)};
}

std::vector<Projection> load_projections(const std::string& path, std::span<const int64_t> ranks,
                                         int64_t width, const ModelIdentity& model,
                                         const std::string& heads) {
  const std::string where = "projection " + path;
  std::unique_ptr<SafetensorsFile> file;
  try {
    file = std::make_unique<SafetensorsFile>(path);
  } catch (const ConfigError& error) {
    throw ConfigError(where + ": must be a readable safetensors file: " + error.what());
  }
  check_metadata(where, file->metadata(), model, heads);
  std::vector<Projection> projections;
  for (const int64_t rank : ranks) {
    const std::string layer = "layers." + std::to_string(projections.size());
    projections.push_back({width, rank, read_matrix(where, *file, layer + ".key", rank, width),
                           read_matrix(where, *file, layer + ".query", rank, width)});
  }
  return projections;
}

}  // namespace kvswap
