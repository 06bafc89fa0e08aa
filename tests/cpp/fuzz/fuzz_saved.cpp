// Saved caches: the manifest, whose sizes may lie, and the state's tensors.

#include <fcntl.h>

#include "fuzz_target.h"
#include "io/anonymous_file.h"
#include "kvswap/errors.h"
#include "kvswap/saved_manifest.h"
#include "kvswap/saved_state.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const std::string text(reinterpret_cast<const char*>(data), size);
    const kvswap::SavedManifest manifest = kvswap::read_manifest(text, "fuzz");
    CHECK(manifest.records_bytes / manifest.counts.record_bytes >= manifest.counts.records);
  } catch (const kvswap::ConfigError&) {
  } catch (const kvswap::SessionError&) {
  }
  const FuzzFile file(data, size);
  try {
    const kvswap::OwnedFd fd(::open(file.path().c_str(), O_RDONLY | O_CLOEXEC));
    const kvswap::SavedState state(fd.get(), static_cast<int64_t>(size), "fuzz");
    const int64_t shape[] = {2, 3};
    const auto found = state.get("records", "U32", shape);
    CHECK(!found.is_ok() || found.value().size() == 24);
  } catch (const kvswap::SessionError&) {
  }
  return 0;
}
