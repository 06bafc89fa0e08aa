#include "kvswap/saved_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "io/error_text.h"
#include "io/file_bytes.h"
#include "io/syscalls.h"
#include "kvswap/budget.h"
#include "kvswap/engine_calls.h"
#include "kvswap/saved_folder.h"

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

int64_t size_of(int fd, const std::string& path, const char* file) {
  struct stat facts{};
  const int known = syscalls().facts(fd, &facts);
  if (known == 0) return facts.st_size;
  throw SessionError(SessionError::Kind::kStorage,
                     "open: " + path + "/" + file + " must be readable, got " + errno_text(-known) +
                         storage_hint(-known),
                     -known, path);
}

void check_size(int fd, const std::string& path, const char* file, int64_t saved_bytes) {
  const int64_t bytes = size_of(fd, path, file);
  if (bytes == saved_bytes) return;
  damaged(path, file,
          "have " + std::to_string(saved_bytes) + " bytes, and has " + std::to_string(bytes));
}

std::string text_of(int fd, const std::string& path) {
  const int64_t size = size_of(fd, path, kManifestFile);
  if (size < 2 || size > kManifestBytesMax) {
    damaged(path, kManifestFile, "be of 2 to " + std::to_string(kManifestBytesMax) + " bytes");
  }
  std::string text(size, '\0');
  const std::string name = path + "/" + kManifestFile;
  throw_status(read_exactly(fd, 0, std::as_writable_bytes(std::span(text)), name));
  return text;
}

/// What was opened may have been removed, or replaced, before it was locked.
void check_is_there(int folder, const std::string& path) {
  struct stat held{};
  struct stat named{};
  if (syscalls().facts(folder, &held) == 0 &&
      syscalls().facts_at(AT_FDCWD, path.c_str(), &named, 0) == 0 && held.st_ino == named.st_ino &&
      held.st_dev == named.st_dev) {
    return;
  }
  throw SessionError(SessionError::Kind::kStorage,
                     "open: " + path + " was replaced or removed meanwhile; open it again", ENOENT,
                     path);
}

}  // namespace

SavedCache::Impl::Impl(const std::string& path) : path(path) {
  folder = taken(open_saved_folder(path));
  auto opened = open_saved_file(folder.get(), path, kRecordsFile);
  if (!opened.is_ok()) check_is_there(folder.get(), path);  // its files go one after the other
  records = taken(std::move(opened));
  if (::flock(records.get(), LOCK_SH | LOCK_NB) != 0) {
    throw SessionError(SessionError::Kind::kStorage,
                       "open: " + path + " is being replaced or removed; open it again", EBUSY,
                       path);
  }
  check_is_there(folder.get(), path);
  const OwnedFd manifest_file = taken(open_saved_file(folder.get(), path, kManifestFile));
  text = text_of(manifest_file.get(), path);
  manifest = read_manifest(text, path);
  check_size(records.get(), path, kRecordsFile, manifest.records_bytes);
  state_file = taken(open_saved_file(folder.get(), path, kStateFile));
  check_size(state_file.get(), path, kStateFile, manifest.state_bytes);
  const std::string state_path = path + "/" + kStateFile;
  state = std::make_unique<SavedState>(state_file.get(), manifest.state_bytes, state_path);
  const auto checksum = state->checksum();
  throw_status(checksum.status());
  if (checksum.value() != manifest.state_checksum) {
    damaged(path, kStateFile, "have the checksum that was saved");
  }
  read_kept();
}

void SavedCache::Impl::read_kept() {
  for (const auto& [name, tensor] : state->header().tensors) {
    if (!name.starts_with(kKeptPrefix)) continue;
    auto bytes = state->read(tensor);
    throw_status(bytes.status());
    kept[name.substr(std::strlen(kKeptPrefix))] = {tensor.dtype, tensor.shape, bytes.value()};
    kept_bytes_.push_back(std::move(bytes.value()));
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
