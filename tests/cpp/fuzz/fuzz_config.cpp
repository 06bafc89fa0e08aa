// Config files: JSON, its fields and their rules. Refused in words or taken, never a crash.

#include "fuzz_target.h"
#include "kvswap/errors.h"
#include "kvswap/swap_config.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const FuzzFile file(data, size);
  try {
    const kvswap::SwapConfig config = kvswap::SwapConfig::load(file.path());
    (void)config.for_batch_and_context(1, 4096);
    (void)config.projection_path();
    config.check_model(
        kvswap::identity_of({.layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 16}, ""));
  } catch (const kvswap::ConfigError&) {
  }
  return 0;
}
