#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvswap/cache_options.h"
#include "kvswap/errors.h"
#include "kvswap/safetensors.h"

namespace kvswap {

/// A tensor that a program keeps with a saved session; its bytes are the program's.
struct KeptTensor {
  std::string name;
  std::string dtype;  // as safetensors writes it: F32, BF16, I64, BOOL, ...
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // row-major
};

/// How a session is saved.
struct SaveArgs {
  std::string path;  // of the folder that it becomes
  bool overwrite = false;
  std::string facts = "{}";  // a JSON object of the program's own, into the manifest
  std::vector<KeptTensor> tensors = {};
};

/// A session in a folder: manifest.json, state.safetensors, records.bin; docs/saved_caches.md has
/// the format.
///
/// Opening checks manifest and state whole, and reads no record (of clusters see SnapshotReader):
/// those are checked when they are read, as ever. Nothing is changed. While this, or a session over
/// it, lives, the folder is locked: other processes may open it too, but nobody replaces or removes
/// it.
///
/// Throws ConfigError for a file of a newer version, SessionError for what is damaged (kCorrupt) or
/// refused. Thread rules: const after opening, any thread.
class SavedCache {
 public:
  static std::shared_ptr<const SavedCache> open(const std::string& path);
  ~SavedCache();

  const std::string& path() const;
  const std::string& manifest() const;  // JSON
  const std::string& facts() const;     // the program's own, JSON
  /// The program's own tensors; their bytes stand as long as this does.
  const std::map<std::string, StoredTensor>& tensors() const;
  int64_t tokens() const;  // of each sequence, padding included
  int64_t sequences() const;
  /// What a session over it is opened with: shape and settings as saved. Where the budget is less
  /// than they want, fewer pages are kept for reuse, which changes no answer; without a
  /// max_context those leave room for half as many tokens again, where that can be. Throws
  /// SessionError (kBudget) where the budget is not enough for what was saved.
  CacheOptions options(const std::string& directory, const Budget& budget,
                       int64_t timeline_spans = 0) const;
  /// Reads every record. Throws SessionError (kCorrupt) for the first that is damaged.
  void verify() const;
  /// Removes the folder, where nobody uses it.
  static void remove(const std::string& path);

  class Impl;
  const Impl& impl() const { return *impl_; }

 private:
  explicit SavedCache(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvswap
