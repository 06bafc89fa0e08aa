// Sizes that people write: "1.5GiB".

#include "fuzz_target.h"
#include "kvswap/errors.h"
#include "kvswap/memory_size.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const std::string text(reinterpret_cast<const char*>(data), size);
    CHECK(kvswap::parse_bytes(text, "fuzz") > 0);
  } catch (const kvswap::ConfigError&) {
  }
  return 0;
}
