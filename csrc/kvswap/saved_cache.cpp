#include "kvswap/saved_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "io/error_text.h"
#include "kvswap/budget.h"
#include "kvswap/engine_calls.h"
#include "kvswap/saved_folder.h"
#include "store/checksum.h"

namespace kvswap {
namespace {

constexpr int64_t kManifestBytesMax = 16 << 20;

[[noreturn]] void damaged(const std::string& path, const char* file, const std::string& must) {
  throw SessionError(
      SessionError::Kind::kCorrupt,
      "open: " + path + "/" + file + " is damaged: it must " + must + "; save the cache again", EIO,
      path);
}

OwnedFd taken(Result<OwnedFd> opened) {
  throw_status(opened.status());
  return std::move(opened.value());
}

int64_t size_of(int fd) {
  struct stat facts{};
  return ::fstat(fd, &facts) == 0 ? static_cast<int64_t>(facts.st_size) : -1;
}

std::string text_of(int fd, const std::string& path) {
  const int64_t size = size_of(fd);
  if (size < 2 || size > kManifestBytesMax) {
    damaged(path, kManifestFile, "be of 2 to " + std::to_string(kManifestBytesMax) + " bytes");
  }
  std::string text(size, '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = ::pread(fd, text.data() + done, text.size() - done, done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) damaged(path, kManifestFile, "be readable");
    done += static_cast<size_t>(count);
  }
  return text;
}

/// What was opened may have been removed, or replaced, before it was locked.
void check_is_there(int folder, const std::string& path) {
  struct stat held{};
  struct stat named{};
  if (::fstat(folder, &held) == 0 && ::stat(path.c_str(), &named) == 0 &&
      held.st_ino == named.st_ino && held.st_dev == named.st_dev) {
    return;
  }
  throw SessionError(SessionError::Kind::kStorage,
                     "open: " + path + " was replaced or removed meanwhile; open it again", ENOENT,
                     path);
}

}  // namespace

std::string descriptor_path(int fd) { return "/proc/self/fd/" + std::to_string(fd); }

SavedCache::Impl::Impl(const std::string& path) : path(path) {
  folder = taken(open_saved_folder(path));
  records = taken(open_saved_file(folder.get(), path, kRecordsFile));
  if (::flock(records.get(), LOCK_SH | LOCK_NB) != 0) {
    throw SessionError(SessionError::Kind::kStorage,
                       "open: " + path + " is being replaced or removed; open it again", EBUSY,
                       path);
  }
  check_is_there(folder.get(), path);
  const OwnedFd manifest_file = taken(open_saved_file(folder.get(), path, kManifestFile));
  text = text_of(manifest_file.get(), path);
  manifest = read_manifest(text, path);
  if (size_of(records.get()) != manifest.records_bytes) {
    damaged(path, kRecordsFile,
            "have " + std::to_string(manifest.records_bytes) + " bytes, and has " +
                std::to_string(size_of(records.get())));
  }
  const OwnedFd state_file = taken(open_saved_file(folder.get(), path, kStateFile));
  if (size_of(state_file.get()) != manifest.state_bytes) {
    damaged(path, kStateFile,
            "have " + std::to_string(manifest.state_bytes) + " bytes, and has " +
                std::to_string(size_of(state_file.get())));
  }
  state = std::make_unique<SavedState>(descriptor_path(state_file.get()), path + "/" + kStateFile);
  if (checksum_of(state->file().bytes()) != manifest.state_checksum) {
    damaged(path, kStateFile, "have the checksum that was saved");
  }
  for (const auto& [name, tensor] : state->file().tensors()) {
    if (name.starts_with(kKeptPrefix)) kept[name.substr(std::strlen(kKeptPrefix))] = tensor;
  }
}

SavedCache::SavedCache(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

SavedCache::~SavedCache() = default;

std::shared_ptr<const SavedCache> SavedCache::open(const std::string& path) {
  return std::shared_ptr<const SavedCache>(new SavedCache(std::make_unique<Impl>(path)));
}

const std::string& SavedCache::path() const { return impl_->path; }
const std::string& SavedCache::manifest() const { return impl_->text; }
const std::string& SavedCache::facts() const { return impl_->manifest.facts; }
const std::map<std::string, StoredTensor>& SavedCache::tensors() const { return impl_->kept; }
int64_t SavedCache::tokens() const { return impl_->manifest.counts.positions; }
int64_t SavedCache::sequences() const {
  const SavedManifest& manifest = impl_->manifest;
  const bool is_apart = manifest.settings.heads == "each";
  return manifest.counts.sequences / (is_apart ? manifest.shape.kv_heads : 1);
}

CacheOptions SavedCache::options(const std::string& directory, const Budget& budget,
                                 int64_t timeline_spans) const {
  const SavedManifest& manifest = impl_->manifest;
  CacheOptions options = {.shape = manifest.shape,
                          .settings = manifest.settings,
                          .ranks = manifest.ranks,
                          .directory = directory,
                          .budget = budget,
                          .timeline_spans = timeline_spans};
  if (!budget.kv_memory_bytes) return options;
  const Request request = {.kv_memory_bytes = *budget.kv_memory_bytes,
                           .context = std::max(tokens(), budget.max_context.value_or(0)),
                           .batch = std::max(sequences(), budget.max_batch.value_or(0))};
  const auto need = [&](const Settings& settings, int64_t batch, int64_t context) {
    CacheOptions candidate = options;
    candidate.settings = settings;
    return memory_need(candidate, batch, context, manifest.counts.record_bytes);
  };
  const FirstPass saved = {.batch = request.batch, .tokens = tokens()};
  const int64_t ready_for = budget.max_context ? request.context : saved.context();
  options.settings = fit_pages(request, options.settings, need, ready_for);
  return options;
}

void SavedCache::remove(const std::string& path) { throw_status(remove_saved(path)); }

}  // namespace kvswap
