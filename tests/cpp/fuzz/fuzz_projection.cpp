// Projection files: the safetensors format, its metadata and the matrices.

#include <array>

#include "fuzz_target.h"
#include "kvswap/errors.h"
#include "kvswap/projection_file.h"
#include "kvswap/swap_config.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr std::array<int64_t, 2> ranks = {2, 1};
  const FuzzFile file(data, size);
  try {
    const auto projections = kvswap::load_projections(file.path(), ranks, 4, {});
    CHECK(projections.size() == ranks.size());
    for (size_t i = 0; i < ranks.size(); ++i) {
      CHECK(projections[i].keys.size() == static_cast<size_t>(4 * ranks[i]));
      CHECK(projections[i].queries.size() == static_cast<size_t>(4 * ranks[i]));
    }
  } catch (const kvswap::ConfigError&) {
  }
  return 0;
}
