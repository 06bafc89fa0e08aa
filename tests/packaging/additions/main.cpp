// additions CONFIG FOLDER: opens a session with the config, appends what stands in FOLDER's
// keys.bin, asks with its query.bin, and prints the setting `patience` and the groups selected,
// then the attention of the query.
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "kvswap/cache.h"

namespace {

std::vector<float> floats(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const auto* first = reinterpret_cast<const float*>(bytes.data());
  return {first, first + bytes.size() / sizeof(float)};
}

}  // namespace

int main(int, char** arguments) try {
  const std::string folder = arguments[2];
  const auto keys = floats(folder + "/keys.bin");
  const auto query = floats(folder + "/query.bin");
  kvswap::OpenArgs args;
  args.shape = {.layers = 1, .heads = 4, .kv_heads = 2, .head_dim = 16};
  args.directory = folder;
  args.config_path = arguments[1];
  const int64_t tokens = static_cast<int64_t>(keys.size()) / (2 * 16);
  args.budget = {.kv_memory_bytes = 8 << 20, .max_context = tokens, .max_batch = 1};
  kvswap::Cache cache(args);
  cache.append(0, kvswap::NewTokens::packed(keys.data(), keys.data(), args.shape, 1, tokens));
  // A prompt's own attention, after which a retention policy chooses.
  const std::vector<float> asked(4 * tokens * 16);
  std::vector<float> answered(asked.size());
  cache.attend(0, kvswap::Queries::packed(asked.data(), 4, tokens, 16), 0.25f, answered.data());
  std::vector<float> output(query.size());
  cache.begin_pass(kvswap::Pass::kDecode);
  cache.attend(0, kvswap::Queries::packed(query.data(), 4, 1, 16), 0.25f, output.data());
  std::cout << cache.options().settings.patience;
  const auto selected = cache.last_selection(0);
  for (const int64_t group : selected.at(0)) std::cout << ' ' << group;
  std::cout << '\n';
  for (const float number : output) std::cout << number << ' ';
  std::cout << '\n';
} catch (const std::exception& error) {
  std::cout << error.what() << '\n';
  return 1;
}
