#pragma once

#include <map>
#include <memory>
#include <string>

#include "io/unnamed_file.h"
#include "kvswap/saved_cache.h"
#include "kvswap/saved_manifest.h"
#include "kvswap/saved_state.h"
#include "kvswap/staged_folder.h"

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
  std::unique_ptr<SavedState> state;
  std::map<std::string, StoredTensor> kept;
};

/// A name for an open file, for as long as it is open in this process.
std::string descriptor_path(int fd);

}  // namespace kvswap
