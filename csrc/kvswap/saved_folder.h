#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/anonymous_file.h"
#include "kvswap/atomic_directory.h"
#include "kvswap/saved_cache.h"
#include "kvswap/saved_manifest.h"
#include "kvswap/saved_state.h"

namespace kvswap {

/// An opened folder: what was checked, and the lock.
class SavedCache::Impl {
 public:
  explicit Impl(const std::string& path);

  const std::string path;
  OwnedFd folder;
  OwnedFd records;  // holds the shared lock
  std::string text;
  SavedManifest manifest;
  OwnedFd state_file;
  std::unique_ptr<SavedState> state;
  std::map<std::string, StoredTensor> kept;

 private:
  void read_kept();

  std::vector<SavedBytes> kept_bytes_;
};

}  // namespace kvswap
