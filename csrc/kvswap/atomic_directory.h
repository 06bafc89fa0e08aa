#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/anonymous_file.h"
#include "io/status.h"

namespace kvswap {

// The files of a saved cache. Who uses one holds a shared lock on the records' file, who replaces
// or removes it an exclusive one.
inline constexpr const char* kManifestFile = "manifest.json";
inline constexpr const char* kStateFile = "state.safetensors";
inline constexpr const char* kRecordsFile = "records.bin";

/// A folder (0700) that becomes one of that name when it is complete, or nothing at all.
///
/// States: staged, beside its place under a hidden name -> published, or removed with this object.
/// What a process leaves that was killed is removed by the next one that stages there. Everything
/// is on the disk when publish() returns. Not thread-safe.
class AtomicDirectory {
 public:
  enum class Existing { kRefuse, kReplace };

  /// kInvalid (EEXIST) where the target is there and is not to be replaced.
  /// own: files that the saver itself holds a shared lock on, open as long as this lives.
  static Result<std::unique_ptr<AtomicDirectory>> create(const std::string& target,
                                                         Existing existing,
                                                         std::span<const int> own = {});
  ~AtomicDirectory();

  int fd() const { return folder_.get(); }
  const std::string& target() const { return target_; }
  /// A new file, 0600; finish_file() when it is written.
  Result<OwnedFd> create_file(const char* name);
  Status finish_file(int fd, const char* name);
  Status publish();

 private:
  AtomicDirectory(std::string target, Existing existing, std::span<const int> own)
      : target_(std::move(target)), existing_(existing), own_(own.begin(), own.end()) {}
  Status replace();

  const std::string target_;
  const Existing existing_;
  const std::vector<int> own_;
  OwnedFd parent_;
  OwnedFd folder_;
  std::string name_;         // in the parent
  std::string staged_name_;  // the same, hidden; empty: nothing is staged
};

/// Writes all of it; a disk that is full says so by the path.
Status write_all(int fd, const std::string& path, const void* data, size_t bytes,
                 int64_t offset_bytes);

/// Removes a saved cache that nobody uses: it is gone at once or stays whole.
Status remove_saved(const std::string& target);

/// The folder of a saved cache; no link is followed in its last part.
Result<OwnedFd> open_saved_folder(const std::string& target);
/// A file in it, for reading: a regular one, and no link.
Result<OwnedFd> open_saved_file(int folder, const std::string& target, const char* name);

}  // namespace kvswap
