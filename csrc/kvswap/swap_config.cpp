#include "kvswap/swap_config.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <tuple>

#include "kvswap/config_json.h"
#include "kvswap/errors.h"
#include "kvswap/settings_rules.h"
#include "methods/summary/summary_encoder.h"

namespace kvswap {
namespace {

/// The whole of a file; ConfigError where it cannot be read.
constexpr size_t kFileBytesMax = 4 << 20;

std::string read_file(const std::string& path, const std::string& where) {
  const auto refuse = [&](const std::string& why) {
    throw ConfigError(where + ": must be a readable JSON file: " + why);
  };
  std::error_code error;
  const auto type = std::filesystem::status(path, error).type();
  // A pipe or a device could wait or go on for ever.
  if (type != std::filesystem::file_type::regular) {
    refuse(type == std::filesystem::file_type::directory ? std::strerror(EISDIR)
           : error                                       ? error.message()
                                                         : "it is no regular file");
  }
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open()) refuse(std::strerror(errno != 0 ? errno : EIO));
  std::string text(kFileBytesMax + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) refuse(std::strerror(errno != 0 ? errno : EIO));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kFileBytesMax) {
    refuse("it is longer than " + std::to_string(kFileBytesMax) + " bytes");
  }
  return text;
}

/// Of rows that have one.
void check_ranks(const Settings& settings, int64_t width) {
  const RankRange range = {width};
  if (SummaryKind::find(settings.rows)->takes_projections && !range.holds(settings.rank)) {
    throw ConfigError("summary.rank: must be " + range.words() + ", since the keys are no wider");
  }
}

void check_layers(const std::string& name, const std::vector<int64_t>& numbers, int64_t layers) {
  for (const int64_t layer : numbers) {
    if (layer < layers) continue;
    throw ConfigError(name + ": must be below " + std::to_string(layers) +
                      ", the layers on disk, got " + std::to_string(layer));
  }
}

double distance(const Solution& row, int64_t batch, int64_t context) {
  const auto doublings = [](int64_t ours, int64_t asked) {
    return std::abs(std::log2(static_cast<double>(ours) / static_cast<double>(asked)));
  };
  return doublings(row.batch, batch) + doublings(row.context, context);
}

}  // namespace

SwapConfig SwapConfig::load(const std::string& path) {
  const std::string where = "config " + path;
  SwapConfig config = config_from_json(read_file(path, where), where);
  config.source = path;
  return config;
}

const Settings& SwapConfig::for_batch_and_context(int64_t batch, int64_t context) const {
  if (batch < 1 || context < 1) {
    throw ConfigError("for_batch_and_context: both must be positive, got " + std::to_string(batch) +
                      " and " + std::to_string(context));
  }
  if (table.empty()) return settings;
  const auto rank_of = [&](const Solution& row) {
    return std::tuple(distance(row, batch, context), -row.context, -row.batch);
  };
  return std::min_element(
             table.begin(), table.end(),
             [&](const Solution& a, const Solution& b) { return rank_of(a) < rank_of(b); })
      ->settings;
}

void SwapConfig::check_model(const ModelIdentity& identity) const {
  if (model) {
    const std::string told = differences(*model, identity);
    if (!told.empty()) {
      throw ConfigError((source.empty() ? "config" : "config " + source) +
                        ": must be for the model it is used with, but was made for " + told +
                        "; calibrate this model, or leave the config out");
    }
  }
  if (identity.layers) {
    ranks_of(settings, *identity.layers);
    check_layers("prefetch.skip_layers", settings.true_query_layers, *identity.layers);
    check_layers("selection.dense_layers", settings.exact_layers, *identity.layers);
  }
  if (identity.kv_heads && identity.head_dim) {
    const int64_t width = row_width(settings, *identity.kv_heads, *identity.head_dim);
    check_ranks(settings, width);
    for (const Solution& row : table) check_ranks(row.settings, width);
  }
}

int64_t row_width(const Settings& settings, int64_t kv_heads, int64_t head_dim) {
  return (settings.heads == "each" ? 1 : kv_heads) * head_dim;
}

std::string SwapConfig::projection_path() const {
  if (!settings.projection_file) return "";
  const size_t slash = source.rfind('/');
  return (slash == std::string::npos ? "" : source.substr(0, slash + 1)) +
         *settings.projection_file;
}

std::vector<int64_t> ranks_of(const Settings& settings, int64_t layers) {
  if (const auto* one = std::get_if<int64_t>(&settings.rank)) {
    return std::vector<int64_t>(layers, *one);
  }
  const auto& each = std::get<std::vector<int64_t>>(settings.rank);
  if (static_cast<int64_t>(each.size()) != layers) {
    throw ConfigError("summary.rank: must be one number or " + std::to_string(layers) +
                      ", one for each layer on disk, got " + std::to_string(each.size()));
  }
  return each;
}

const char* element_name(ElementType type) {
  return type == ElementType::kFloat32    ? "float32"
         : type == ElementType::kBFloat16 ? "bfloat16"
                                          : "float16";
}

ModelIdentity identity_of(const ModelShape& shape, const std::string& model_type) {
  ModelIdentity identity;
  if (!model_type.empty()) identity.model_type = model_type;
  identity.layers = shape.layers;
  identity.heads = shape.heads;
  identity.kv_heads = shape.kv_heads;
  identity.head_dim = shape.head_dim;
  identity.dtype = element_name(shape.dtype);
  return identity;
}

std::string differences(const ModelIdentity& ours, const ModelIdentity& theirs) {
  std::string told;
  const auto shown = [](const auto& value) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::string>) {
      return value;
    } else {
      return std::to_string(value);
    }
  };
  visit_identity([&](const char* name, auto member) {
    // Projections do not depend on it, and what memory is needed is counted anew.
    if (std::string_view(name) == "dtype") return;
    const auto& mine = ours.*member;
    const auto& other = theirs.*member;
    if (!mine || !other || *mine == *other) return;
    told += (told.empty() ? "" : ", ") + std::string(name) + " " + shown(*mine) +
            " (this model: " + shown(*other) + ")";
  });
  return told;
}

}  // namespace kvswap
