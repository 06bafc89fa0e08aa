#include "kvswap/saved_session.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "engine/snapshot/tensor_names.h"
#include "io/error_text.h"
#include "io/read_only_file.h"
#include "io/syscalls.h"
#include "kvswap/carried_state.h"
#include "kvswap/engine_calls.h"
#include "kvswap/safetensors_writer.h"
#include "kvswap/saved_folder.h"

namespace kvswap {
namespace {

/// What a program keeps, as tensors of the state.
std::vector<SavedTensor> kept_tensors(const SaveArgs& args) {
  std::vector<SavedTensor> tensors;
  for (const KeptTensor& kept : args.tensors) {
    if (kept.bytes.empty()) continue;
    const auto row_bytes = static_cast<int64_t>(kept.bytes.size()) / kept.shape.at(0);
    tensors.push_back(
        {kKeptPrefix + kept.name, kept.dtype, kept.shape, row_bytes,
         [bytes = kept.bytes, row_bytes](int64_t first, int64_t count, std::byte* target) {
           std::memcpy(target, bytes.data() + first * row_bytes, count * row_bytes);
           return Status::ok();
         }});
  }
  return tensors;
}

/// A folder that is filled with one session.
class FolderTarget final : public SnapshotTarget {
 public:
  FolderTarget(std::unique_ptr<AtomicDirectory> folder, SavedManifest manifest,
               const SaveArgs& args)
      : folder_(std::move(folder)), manifest_(std::move(manifest)), args_(args) {}

  Result<bool> link_records(int fd) override {
    const int named = syscalls().name_file(fd, folder_->fd(), kRecordsFile);
    // Another file system, one without unnamed files, or a limit of this one: a copy will do.
    if (named == -ENOSPC || named == -EDQUOT || named == -EIO) {
      return Status::storage("save: " + folder_->target() + " must take its records, got " +
                                 errno_text(-named) + storage_hint(-named),
                             -named, folder_->target());
    }
    if (named != 0) return false;
    // Everybody who opens it shares it with us: nobody removes it meanwhile.
    (void)::flock(fd, LOCK_SH | LOCK_NB);
    struct stat facts{};
    if (::fchmod(fd, 0600) != 0 || ::fstat(fd, &facts) != 0) {
      return Status::storage("save: the records must be ours, got " + errno_text(errno), errno,
                             folder_->target());
    }
    manifest_.records_bytes = facts.st_size;
    has_records_ = true;
    KVSWAP_RETURN_IF_ERROR(folder_->finish_file(fd, kRecordsFile));
    return true;
  }

  Status write_records(std::span<const std::byte> records) override {
    if (!has_records_) KVSWAP_RETURN_IF_ERROR(create_records());
    KVSWAP_RETURN_IF_ERROR(write_all(records_.get(), folder_->target(), records.data(),
                                     records.size(), manifest_.records_bytes));
    manifest_.records_bytes += static_cast<int64_t>(records.size());
    return Status::ok();
  }

  Status finish(const SavedCounts& counts, std::span<const SavedTensor> tensors) override {
    if (!has_records_) KVSWAP_RETURN_IF_ERROR(create_records());
    if (records_.get() >= 0) {
      KVSWAP_RETURN_IF_ERROR(folder_->finish_file(records_.get(), kRecordsFile));
    }
    manifest_.counts = counts;
    std::vector<SavedTensor> all(tensors.begin(), tensors.end());
    for (SavedTensor& kept : kept_tensors(args_)) all.push_back(std::move(kept));
    KVSWAP_RETURN_IF_ERROR(write_state(all));
    KVSWAP_RETURN_IF_ERROR(write_manifest());
    return folder_->publish();
  }

 private:
  Status create_records() {
    auto created = folder_->create_file(kRecordsFile);
    if (!created.is_ok()) return created.status();
    records_ = std::move(created.value());
    has_records_ = true;
    return Status::ok();
  }

  Status write_state(std::span<const SavedTensor> tensors) {
    auto file = folder_->create_file(kStateFile);
    if (!file.is_ok()) return file.status();
    auto written = write_safetensors(file.value().get(), folder_->target(), tensors, {});
    if (!written.is_ok()) return written.status();
    manifest_.state_bytes = written.value();
    KVSWAP_RETURN_IF_ERROR(folder_->finish_file(file.value().get(), kStateFile));
    const SavedState state(file.value().get(), manifest_.state_bytes, folder_->target());
    auto checksum = state.checksum();
    if (!checksum.is_ok()) return checksum.status();
    manifest_.state_checksum = checksum.value();
    return Status::ok();
  }

  Status write_manifest() {
    const std::string text = manifest_text(manifest_);
    auto file = folder_->create_file(kManifestFile);
    if (!file.is_ok()) return file.status();
    KVSWAP_RETURN_IF_ERROR(
        write_all(file.value().get(), folder_->target(), text.data(), text.size(), 0));
    return folder_->finish_file(file.value().get(), kManifestFile);
  }

  std::unique_ptr<AtomicDirectory> folder_;
  SavedManifest manifest_;
  const SaveArgs& args_;
  OwnedFd records_;
  bool has_records_ = false;
};

}  // namespace

void save_engine(Engine& engine, const CacheOptions& options, const SaveArgs& args) {
  for (const KeptTensor& kept : args.tensors) {
    if (kept.name.empty() || kept.name.find('\0') != std::string::npos || kept.shape.empty()) {
      throw std::invalid_argument(
          "save: a kept tensor must have a name without NUL and a dimension, got '" +
          kept.name.substr(0, kept.name.find('\0')) + "'");
    }
  }
  SavedManifest manifest;
  manifest.shape = options.shape;
  manifest.settings = options.settings;
  manifest.ranks = engine.options().ranks;
  manifest.facts = args.facts;
  (void)manifest_text(manifest);  // facts that are none are refused before anything is made
  std::vector<int> own;
  for (const LayeredFile::Part& part : engine.context().file->parts())
    own.push_back(part.file->fd());
  auto folder = AtomicDirectory::create(
      args.path,
      args.overwrite ? AtomicDirectory::Existing::kReplace : AtomicDirectory::Existing::kRefuse,
      own);
  throw_status(folder.status());
  FolderTarget target(std::move(folder.value()), std::move(manifest), args);
  throw_status(engine.saver().save(target));
}

std::unique_ptr<Engine> open_engine(const SavedCache& saved, const CacheOptions& options,
                                    ParallelFor parallel) {
  const SavedCache::Impl& impl = saved.impl();
  const SavedCounts& counts = impl.manifest.counts;
  // A descriptor of its own: O_DIRECT is one's own, and so is the lock.
  const std::string own = "/proc/self/fd/" + std::to_string(impl.records.get());
  OwnedFd records(syscalls().open(own.c_str(), O_RDONLY | O_CLOEXEC, 0));
  const int error = records.get() < 0                                ? -records.get()
                    : ::flock(records.get(), LOCK_SH | LOCK_NB) != 0 ? errno
                                                                     : 0;
  if (error != 0) {
    throw SessionError(SessionError::Kind::kStorage,
                       "open: the records of " + impl.path + " must be readable, got " +
                           errno_text(error) + storage_hint(error),
                       error, impl.path);
  }
  EngineOptions engine = engine_options(options);
  auto base = std::make_shared<ParentFiles>();
  base->parts.push_back(
      {make_read_only_file(std::move(records),
                           {.directory = impl.path,
                            .wants_direct = options.settings.io_mode != "buffered",
                            .unit_bytes = counts.record_bytes}),
       0});
  base->end_bytes = impl.manifest.records_bytes;
  base->record_bytes = counts.record_bytes;
  base->seeds = {{0, counts.seed}};
  base->groups = counts.groups;
  engine.base = std::move(base);
  auto opened = Engine::create(engine, std::move(parallel));
  throw_status(opened.status());
  throw_status(opened.value()->loader().load(counts, *impl.state));
  return std::move(opened.value());
}

std::unique_ptr<Engine> fork_engine(Engine& engine, ParallelFor parallel) {
  const CarriedState state(engine, CarriedState::Summaries::kShared);
  return state.open(engine.options(), std::move(parallel));
}

void SavedCache::verify() const {
  // Nothing is written, but a session has a file.
  CacheOptions options = this->options(std::filesystem::temp_directory_path(), {});
  options.settings.device_model.reset();
  EngineOptions checked = engine_options(options);
  const auto engine = open_engine(*this, options, nullptr);
  const auto throw_damaged = [this](const Status& read) {
    throw_status(Status::corrupt(
        "verify: " + path() + "/" + kRecordsFile + " is damaged: " + read.message(), path()));
  };
  const int64_t positions = engine->positions(0);
  const int64_t head_bytes = checked.kv_heads * checked.head_dim * dtype_bytes(checked.dtype);
  constexpr int64_t kPositionsAtOnce = 4096;
  std::vector<std::byte> keys(std::min(positions, kPositionsAtOnce) * head_bytes);
  std::vector<std::byte> values(keys.size());
  for (int64_t layer = 0; layer < checked.layers; ++layer) {
    for (int64_t sequence = 0; sequence < engine->batch(); ++sequence) {
      for (int64_t begin = 0; begin < positions; begin += kPositionsAtOnce) {
        const int64_t end = std::min(positions, begin + kPositionsAtOnce);
        const Status read =
            engine->read_back(layer, sequence, begin, end, keys.data(), values.data());
        if (read.code() == StatusCode::kCorrupt) throw_damaged(read);
        throw_status(read);
      }
    }
    const Status pages = engine->saver().verify_clusters(layer);
    if (pages.code() == StatusCode::kCorrupt) throw_damaged(pages);
    throw_status(pages);
  }
}

}  // namespace kvswap
