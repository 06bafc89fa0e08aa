// JSON: refused in words, or taken and written again as the same value.

#include "fuzz_target.h"
#include "kvswap/json.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const kvswap::Json value = kvswap::parse_json({reinterpret_cast<const char*>(data), size});
    CHECK(kvswap::parse_json(value.dump()) == value);
    CHECK(kvswap::shown(value).size() <= 123);
    if (const kvswap::Json* field = kvswap::find_field(value, "a")) CHECK(*field == value["a"]);
  } catch (const kvswap::JsonError&) {
  }
  return 0;
}
