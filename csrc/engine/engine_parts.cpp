#include "engine/engine_parts.h"

#include <utility>

#include "engine/account.h"
#include "engine/device_space.h"
#include "engine/saved_names.h"
#include "io/memory_file.h"
#include "methods/cluster_selector.h"
#include "methods/make_selector.h"
#include "store/pool_layout.h"

namespace kvswap {

Result<std::unique_ptr<EngineParts>> EngineParts::open(const EngineOptions& options,
                                                       ParallelFor parallel) {
  auto parts = std::make_unique<EngineParts>(options, std::move(parallel));
  if (options.timeline_spans > 0) {
    KVSWAP_RETURN_IF_ERROR(Account::charge_timeline(*parts));
    parts->timeline = std::make_unique<Timeline>(options.timeline_spans);
  }
  KVSWAP_RETURN_IF_ERROR(parts->open_file());
  auto reader = parts->open_reader_of_file();
  if (!reader.is_ok()) return reader.status();
  KVSWAP_RETURN_IF_ERROR(parts->open_store());
  auto fetcher = Fetcher::create(std::move(reader.value()), parts->store.get(),
                                 {.file = parts->file.get(),
                                  .merge_gap_bytes = gap_bytes(options),
                                  .merge_bytes_max = options.merge_bytes_max,
                                  .scrap_at_end = options.memory_at_end(),
                                  .parallel = parts->threads(),
                                  .timeline = parts->timeline.get()});
  if (!fetcher.is_ok()) return fetcher.status();
  parts->fetcher = std::move(fetcher.value());
  KVSWAP_RETURN_IF_ERROR(parts->open_space());
  KVSWAP_RETURN_IF_ERROR(Account::charge_staging(*parts));
  return parts;
}

Result<std::unique_ptr<DataFile>> EngineParts::open_own_file() {
  if (options.drops()) return std::unique_ptr<DataFile>(new MemoryFile(options.wipe_on_close));
  DataFileOptions wanted = options.file_options();
  auto opened = DataFile::open(wanted);
  if (!opened.is_ok()) return opened;
  const int64_t alignment = opened.value()->alignment_bytes();
  if (options.base != nullptr && opened.value()->is_direct() &&
      options.base->record_bytes % alignment != 0) {
    // Saved records keep their size, whatever disk they are continued on.
    wanted.mode = IoMode::kBuffered;
    opened = DataFile::open(wanted);
    if (!opened.is_ok()) return opened;
  }
  return options.wrap_file ? options.wrap_file(std::move(opened.value())) : std::move(opened);
}

Status EngineParts::open_file() {
  auto opened = open_own_file();
  if (!opened.is_ok()) return opened.status();
  fallbacks = opened.value()->fallbacks();
  if (options.base != nullptr) {
    if (!opened.value()->is_direct() && *parse_io_mode(options.io_mode) != IoMode::kBuffered &&
        fallbacks.empty()) {
      fallbacks.push_back("The disk of '" + options.directory +
                          "' reads larger blocks than those the saved records are padded to: "
                          "buffered I/O is used.");
    }
    const BaseFiles& base = *options.base;
    file = std::make_unique<FileStack>(base.parts, std::move(opened.value()),
                                       FileStack::begin_above(base.end_bytes, base.record_bytes));
  } else {
    file =
        std::make_unique<FileStack>(std::vector<FileStack::Part>{}, std::move(opened.value()), 0);
  }
  if (!options.checksum) {
    fallbacks.push_back("Checksums are off: bytes that a disk returns wrongly are used.");
  }
  return Status::ok();
}

Result<std::unique_ptr<BlockReader>> EngineParts::open_reader_of_file() {
  // A modelled device reports when its reads are through, not the disk's.
  ReaderOptions reader_options = options.reader_options();
  if (!options.device_model) reader_options.timeline = timeline.get();
  reader_options.patience = &patience;
  auto opened = open_reader(*file, reader_options);
  if (!opened.is_ok()) return opened.status();
  if (!opened.value().reason.empty()) fallbacks.push_back(opened.value().reason);
  std::unique_ptr<BlockReader> reader = std::move(opened.value().reader);
  if (options.device_model && !options.drops()) {
    const auto model = find_device_model(*options.device_model);
    reader = make_modelled_reader(std::move(reader), *model, timeline.get());
  }
  if (options.wrap_reader) reader = options.wrap_reader(std::move(reader));
  return reader;
}

/// Small records are what heads=each and records=fp8 make; where neither is set, the layout tells.
Status EngineParts::check_group_tokens() const {
  const int64_t tokens_min = options.group_tokens_min(file->alignment_bytes());
  const bool is_each = options.heads == "each";
  const bool is_float8 = options.has_float8_records();
  if (!(is_each || is_float8) || options.group_tokens >= tokens_min) return Status::ok();
  const std::string settings = is_each && is_float8 ? "heads=each and records=fp8"
                               : is_each            ? "heads=each"
                                                    : "records=fp8";
  return Status::invalid(
      "session: with " + settings + " group_tokens must be at least " + std::to_string(tokens_min) +
      ", so that a group " + (is_each ? "of one KV head " : "") + "fills at least half of the " +
      std::to_string(file->alignment_bytes()) + " bytes that the disk reads at once, got " +
      std::to_string(options.group_tokens) + " (" + std::to_string(options.payload_bytes()) +
      " bytes); raise it, or " +
      (is_each ? "let all heads choose together (heads=all)"
               : "keep the model's dtype (records=model)"));
}

Status EngineParts::open_store() {
  if (options.base == nullptr) KVSWAP_RETURN_IF_ERROR(check_group_tokens());
  const BaseFiles* base = options.base.get();
  Result<std::unique_ptr<Layout>> layout =
      base != nullptr ? SequenceLayout::continuing(base->record_bytes, options.layers)
                      : SequenceLayout::create(options.payload_bytes(), file->alignment_bytes(),
                                               options.layers, options.drops() ? 1 : kRunRecords);
  if (!layout.is_ok()) return layout.status();
  if (options.layout == "pools") {
    layout =
        std::unique_ptr<Layout>(new PoolLayout(std::move(layout.value()), pool_options(options)));
  }
  const int64_t record_bytes = layout.value()->record_bytes();
  const RecordStoreOptions store_options = {
      .layers = options.layers,
      .payload_bytes = options.payload_bytes(),
      .note_bytes = options.note_bytes(),
      .checksum = options.checksum,
      .seed = random_seed(),
      .begin_bytes = file->own_begin_bytes(),
      .seeds_below = base != nullptr ? base->seeds : std::vector<SeedRange>{}};
  auto opened = RecordStore::create(file.get(), std::move(layout.value()), store_options,
                                    {.buffer_bytes = write_buffer_bytes(options, record_bytes),
                                     .buffers = static_cast<int>(write_buffers(options)),
                                     .is_wiped = options.wipe_on_close,
                                     .is_within_calls = options.drops(),
                                     .timeline = options.drops() ? nullptr : timeline.get(),
                                     .patience = &patience});
  if (!opened.is_ok()) return opened.status();
  store = std::move(opened.value());
  return Status::ok();
}

Status EngineParts::open_space() {
  MethodOptions method = options.method();
  method.parallel = threads();
  if (!options.device) {
    space = make_host_space(threads(), options.memory_at_end());
    selector = make_selector(method, nullptr);
    if (has_clusters(options)) {
      clusters = &static_cast<ClusterSelector&>(*selector).rows();
    }
    return Status::ok();
  }
  auto opened = DeviceSpace::create(options, record_bytes(), store->writes().queue().memory());
  if (!opened.is_ok()) return opened.status();
  selector = make_selector(method, &opened.value()->device());
  space = std::move(opened.value());
  return Status::ok();
}

}  // namespace kvswap
