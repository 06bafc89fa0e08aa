#include "engine/engine_context.h"

#include <utility>

#include "engine/backend/device_backend.h"
#include "engine/setting_names.h"
#include "engine/snapshot/tensor_names.h"
#include "io/memory_file.h"
#include "methods/clusters/cluster_selector.h"
#include "methods/selection/host_fallback_selector.h"
#include "methods/selection/selector_factory.h"
#include "store/paired_pool_layout.h"

namespace kvswap {

namespace {

/// A new file for a session's records.
Result<std::unique_ptr<DataFile>> open_own(const EngineOptions& options) {
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

/// Small records are what heads apart and rounded records make; without them the layout tells.
Status check_group_tokens(const EngineOptions& options, int64_t alignment_bytes) {
  const int64_t tokens_min = options.group_tokens_min(alignment_bytes);
  const bool is_each = options.heads == "each";
  const bool is_rounded = options.records != "model";
  if (!(is_each || is_rounded) || options.group_tokens >= tokens_min) return Status::ok();
  std::string settings = is_each ? "selection.heads per_head" : "";
  if (is_rounded) {
    settings += (is_each ? " and storage.kv_dtype " : "storage.kv_dtype ") +
                file_word("records", options.records);
  }
  return Status::invalid(
      "session: with " + settings + " selection.group_tokens must be at least " +
      std::to_string(tokens_min) + ", so that a group " + (is_each ? "of one KV head " : "") +
      "fills at least half of the " + std::to_string(alignment_bytes) +
      " bytes that the disk reads at once, got " + std::to_string(options.group_tokens) + " (" +
      std::to_string(options.payload_bytes()) + " bytes); raise it, or " +
      (is_each ? "let all heads choose together (selection.heads joint)"
               : "keep the model's dtype (storage.kv_dtype auto)"));
}

/// Where records stand in it.
Result<std::unique_ptr<Layout>> layout_of(const EngineOptions& options, int64_t alignment_bytes) {
  const ParentFiles* base = options.base.get();
  if (base == nullptr) KVSWAP_RETURN_IF_ERROR(check_group_tokens(options, alignment_bytes));
  Result<std::unique_ptr<Layout>> layout =
      base != nullptr ? SequenceLayout::continuing(base->record_bytes, options.layers)
                      : SequenceLayout::create(options.payload_bytes(), alignment_bytes,
                                               options.layers, options.drops() ? 1 : kRunRecords);
  if (!layout.is_ok() || options.layout != "pools") return layout;
  return std::unique_ptr<Layout>(
      new PairedPoolLayout(std::move(layout.value()), pool_options(options)));
}

}  // namespace

void EngineContext::reserve(Arena& arena, const Plan& plan, const Extent& extent) {
  const EngineOptions& options = plan.options;
  arena.take(Use::kTimeline, Timeline::bytes(options.timeline_spans));
  arena.take(Use::kStaging, plan.write_buffers * plan.write_buffer_bytes + plan.gap_bytes);
  // What a device needs beside is a small part of such sizes, and would not change the answer.
  if (!options.device || arena.total() >= kTooManyBytes) return;
  const int64_t groups = (extent.context + options.group_tokens - 1) / options.group_tokens;
  const int64_t unit = plan.groups_unit;
  DeviceBackend::reserve(arena, plan, extent.batch, (groups + unit - 1) / unit * unit);
  if (plan.chooses_on_device) return;
  arena.take(Use::kStaging, HostFallbackSelector::key_bytes(plan.method));
  arena.take(Use::kScratch, extent.batch * HostFallbackSelector::query_bytes(
                                               plan.method, options.select_queries_max));
}

Result<std::unique_ptr<EngineContext>> EngineContext::open(const EngineOptions& given,
                                                           ParallelFor parallel) {
  auto own = open_own(given);
  if (!own.is_ok()) return own.status();
  auto layout = layout_of(given, own.value()->alignment_bytes());
  if (!layout.is_ok()) return layout.status();
  auto context =
      std::make_unique<EngineContext>(given, layout.value()->record_bytes(), std::move(parallel));
  const Plan& plan = context->plan;
  if (given.timeline_spans > 0) {
    KVSWAP_RETURN_IF_ERROR(context->ledger.charge(
        Use::kTimeline, Timeline::bytes(given.timeline_spans), "the timeline's spans"));
    context->timeline = std::make_unique<Timeline>(given.timeline_spans);
  }
  context->stack(std::move(own.value()));
  auto reader = context->open_reader_of_file();
  if (!reader.is_ok()) return reader.status();
  KVSWAP_RETURN_IF_ERROR(context->open_store(std::move(layout.value())));
  auto fetcher = Fetcher::create(std::move(reader.value()), context->store.get(),
                                 {.file = context->file.get(),
                                  .merge_gap_bytes = plan.gap_bytes,
                                  .merge_bytes_max = given.merge_bytes_max,
                                  .scrap_at_end = given.memory_at_end(),
                                  .parallel = context->threads(),
                                  .timeline = context->timeline.get()});
  if (!fetcher.is_ok()) return fetcher.status();
  context->fetcher = std::move(fetcher.value());
  KVSWAP_RETURN_IF_ERROR(context->open_space());
  return context;
}

Result<std::unique_ptr<DataFile>> EngineContext::open_own_file() { return open_own(options); }

/// Above the files that the session continues.
void EngineContext::stack(std::unique_ptr<DataFile> own) {
  fallbacks = own->fallbacks();
  if (options.base != nullptr) {
    if (!own->is_direct() && *parse_io_mode(options.io_mode) != IoMode::kBuffered &&
        fallbacks.empty()) {
      fallbacks.push_back("The disk of '" + options.directory +
                          "' reads larger blocks than those the saved records are padded to: "
                          "buffered I/O is used.");
    }
    const ParentFiles& base = *options.base;
    file = std::make_unique<LayeredFile>(
        base.parts, std::move(own), LayeredFile::begin_above(base.end_bytes, base.record_bytes));
  } else {
    file = std::make_unique<LayeredFile>(std::vector<LayeredFile::Part>{}, std::move(own), 0);
  }
  if (!options.checksum) {
    fallbacks.push_back("Checksums are off: bytes that a disk returns wrongly are used.");
  }
}

Result<std::unique_ptr<BlockReader>> EngineContext::open_reader_of_file() {
  // A modelled device reports when its reads are through, not the disk's.
  ReaderOptions reader_options = options.reader_options();
  if (!options.device_model) reader_options.timeline = timeline.get();
  reader_options.patience = &patience;
  auto opened = open_reader(*file, reader_options);
  if (!opened.is_ok()) return opened.status();
  if (!opened.value().reason.empty()) fallbacks.push_back(opened.value().reason);
  std::unique_ptr<BlockReader> reader = std::move(opened.value().reader);
  if (options.device_model && !plan.drops) {
    const auto model = find_device_model(*options.device_model);
    reader = make_modelled_reader(std::move(reader), *model, timeline.get());
  }
  if (options.wrap_reader) reader = options.wrap_reader(std::move(reader));
  return reader;
}

Status EngineContext::open_store(std::unique_ptr<Layout> layout) {
  const RecordStoreOptions store_options = {
      .layers = options.layers,
      .payload_bytes = options.payload_bytes(),
      .record_bytes = plan.record_bytes,
      .note_bytes = plan.note_bytes,
      .checksum = options.checksum,
      .seed = random_seed(),
      .begin_bytes = file->own_begin_bytes(),
      .seeds_below = options.base != nullptr ? options.base->seeds : std::vector<SeedRange>{},
      .packing = options.packing()};
  auto opened = RecordStore::create(file.get(), std::move(layout), store_options,
                                    {.buffer_bytes = plan.write_buffer_bytes,
                                     .buffers = static_cast<int>(plan.write_buffers),
                                     .is_wiped = options.wipe_on_close,
                                     .is_within_calls = plan.drops,
                                     .timeline = plan.drops ? nullptr : timeline.get(),
                                     .patience = &patience});
  if (!opened.is_ok()) return opened.status();
  store = std::move(opened.value());
  return Status::ok();
}

Status EngineContext::open_space() {
  MethodOptions method = plan.method;
  method.parallel = threads();
  if (!options.device) {
    space = make_host_space(threads(), options.memory_at_end());
    selector = make_selector(method, nullptr);
    if (plan.has_clusters) {
      clusters = &static_cast<ClusterSelector&>(*selector).rows();
    }
    return Status::ok();
  }
  auto opened = DeviceBackend::create(plan, store->writes().queue().memory());
  if (!opened.is_ok()) return opened.status();
  selector = make_selector(method, &opened.value()->device());
  space = std::move(opened.value());
  return Status::ok();
}

}  // namespace kvswap
