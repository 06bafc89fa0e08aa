#include "engine/engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>

#include "engine/device_space.h"
#include "engine/page_table.h"

namespace kvswap {

Engine::Engine(const EngineOptions& options, ParallelFor parallel)
    : options_(options),
      parallel_(std::move(parallel)),
      owner_pid_(getpid()),
      ledger_(options.kv_memory_bytes),
      layers_(options.layers),
      table_(std::make_unique<PageTable>()) {}

Engine::~Engine() {
  if (getpid() == owner_pid_) {
    settle_choice();
    drop_steps();
    // Whoever closes a session has been told of errors by the calls before.
    (void)settle_seals().is_ok();
  } else if (space_ != nullptr && !space_->is_host()) {
    // A forked child has neither the device nor its threads: leave all of it alone.
    for (auto* sequences : {&sequences_, &spare_}) {
      for (auto& sequence : *sequences) (void)sequence.release();
    }
    (void)selector_.release();
    (void)new std::shared_ptr(std::move(past_blocks_));
    (void)space_.release();
  }
}

Result<std::unique_ptr<Engine>> Engine::create(const EngineOptions& options, ParallelFor parallel) {
  KVSWAP_RETURN_IF_ERROR(options.validate());
  std::unique_ptr<Engine> engine(new Engine(options, std::move(parallel)));
  KVSWAP_RETURN_IF_ERROR(engine->open());
  if (options.max_context > 0 && options.max_batch > 0) {
    KVSWAP_RETURN_IF_ERROR(engine->check_room(options.max_batch, options.max_context));
  }
  return engine;
}

Status Engine::open() {
  const ParallelFor* parallel = parallel_ ? &parallel_ : nullptr;
  if (options_.timeline_spans > 0) {
    KVSWAP_RETURN_IF_ERROR(ledger_.charge(Use::kTimeline, Timeline::bytes(options_.timeline_spans),
                                          "the timeline's spans"));
    timeline_ = std::make_unique<Timeline>(options_.timeline_spans);
  }
  auto file = DataFile::open(options_.file);
  if (!file.is_ok()) return file.status();
  file_ = std::move(file.value());
  if (options_.wrap_file) file_ = options_.wrap_file(std::move(file_));
  fallbacks_ = file_->fallbacks();

  // A modelled device tells when its reads are through, not the disk's.
  ReaderOptions reader_options = options_.reader;
  if (options_.device_model.empty()) reader_options.timeline = timeline_.get();
  auto opened = open_reader(*file_, reader_options);
  if (!opened.is_ok()) return opened.status();
  if (!opened.value().reason.empty()) fallbacks_.push_back(opened.value().reason);
  std::unique_ptr<BlockReader> reader = std::move(opened.value().reader);
  if (!options_.device_model.empty()) {
    const auto model = find_device_model(options_.device_model);
    if (!model) {
      return Status::invalid("session: device must be nvme, ufs or emmc, got '" +
                             options_.device_model + "'");
    }
    reader = make_modelled_reader(std::move(reader), *model, timeline_.get());
  }
  if (options_.wrap_reader) reader = options_.wrap_reader(std::move(reader));

  auto layout =
      SequenceLayout::create(options_.payload_bytes(), file_->alignment_bytes(), options_.layers);
  if (!layout.is_ok()) return layout.status();
  const int64_t record_bytes = layout.value()->record_bytes();
  std::random_device random;
  const RecordStoreOptions store_options = {.layers = options_.layers,
                                            .payload_bytes = options_.payload_bytes(),
                                            .checksum = options_.checksum,
                                            .seed = (uint64_t{random()} << 32) | random()};
  auto store = RecordStore::create(file_.get(), std::move(layout.value()), store_options,
                                   {.buffer_bytes = options_.write_buffer_bytes(record_bytes),
                                    .buffers = kWriteBuffers,
                                    .timeline = timeline_.get()});
  if (!store.is_ok()) return store.status();
  store_ = std::move(store.value());

  auto fetcher = Fetcher::create(std::move(reader), store_.get(),
                                 {.path = options_.file.directory,
                                  .merge_gap_bytes = options_.merge_gap_bytes,
                                  .merge_bytes_max = options_.merge_bytes_max,
                                  .parallel = parallel,
                                  .timeline = timeline_.get()});
  if (!fetcher.is_ok()) return fetcher.status();
  fetcher_ = std::move(fetcher.value());
  if (options_.device) {
    auto space = DeviceSpace::create(options_, record_bytes, store_->staging());
    if (!space.is_ok()) return space.status();
    space_ = std::move(space.value());
  } else {
    space_ = make_host_space(parallel);
  }
  selector_ = space_->make_selector({.layers = options_.layers,
                                     .kv_heads = options_.kv_heads,
                                     .head_dim = options_.head_dim,
                                     .group_tokens = options_.group_tokens,
                                     .summary_dtype = options_.summary_dtype,
                                     .parallel = parallel});
  const MemoryNeed need = memory_need(options_, record_bytes, 0, 0);
  const std::string what = "the staging buffers of writes and long chunks";
  KVSWAP_RETURN_IF_ERROR(ledger_.charge(Use::kDevice, need.device, what));
  return ledger_.charge(Use::kStaging, need.staging, what);
}

Status Engine::check_process() const {
  if (getpid() == owner_pid_) return Status::ok();
  return Status::invalid(
      "session: must be used by the process that opened it, got a call from a forked child; open "
      "a session of its own there");
}

Status Engine::check_layer(int64_t layer) const {
  if (layer >= 0 && layer < options_.layers) return check_process();
  return Status::invalid("session: layer must be 0.." + std::to_string(options_.layers - 1) +
                         ", got " + std::to_string(layer));
}

Status Engine::check_room(int64_t batch, int64_t context) const {
  const MemoryNeed need = memory_need(options_, record_bytes(), batch, context);
  if (options_.kv_memory_bytes >= 0 && need.total() > options_.kv_memory_bytes) {
    return Status::budget(
        "session: kv_memory_bytes must be at least " + std::to_string(need.total()) +
        " for a batch of " + std::to_string(batch) + " and a context of " +
        std::to_string(context) + " tokens (pages " + std::to_string(need.pages) + ", summary " +
        std::to_string(need.summary) + ", tables " + std::to_string(need.tables) + ", staging " +
        std::to_string(need.staging) + ", projections " + std::to_string(need.projections) +
        ", scratch " + std::to_string(need.scratch) +
        (need.timeline > 0 ? ", timeline " + std::to_string(need.timeline) : "") +
        (options_.device
             ? ", device " + std::to_string(need.device) + ", pinned " + std::to_string(need.pinned)
             : "") +
        "), got " + std::to_string(options_.kv_memory_bytes) +
        "; raise it, or lower pages_max, rank, the context or the batch");
  }
  const int64_t disk_bytes =
      options_.layers * batch * options_.sealed_groups(context) * record_bytes();
  if (options_.file.quota_bytes >= 0 && disk_bytes > options_.file.quota_bytes) {
    return Status::budget("session: disk_quota_bytes must be at least " +
                          std::to_string(disk_bytes) + " for a batch of " + std::to_string(batch) +
                          " and a context of " + std::to_string(context) + " tokens, got " +
                          std::to_string(options_.file.quota_bytes));
  }
  const auto free = free_bytes(options_.file.directory);
  if (!free.is_ok()) return free.status();
  const int64_t available = free.value() + file_->allocated_bytes();
  if (disk_bytes > available) {
    return Status::storage(
        "session: " + options_.file.directory + " must have " + std::to_string(disk_bytes) +
            " bytes free for a context of " + std::to_string(context) + " tokens, got " +
            std::to_string(available) + "; free some, choose another path, or lower max_context",
        ENOSPC);
  }
  return Status::ok();
}

Status Engine::allocate(int64_t batch) {
  KVSWAP_RETURN_IF_ERROR(grow_spare(batch - this->batch()));
  while (this->batch() < batch) {
    sequences_.push_back(std::move(spare_.back()));
    spare_.pop_back();
  }
  return Status::ok();
}

Status Engine::grow_spare(int64_t count) {
  const MemoryNeed one = memory_need(options_, record_bytes(), 1, 0);
  while (static_cast<int64_t>(spare_.size()) < count) {
    const std::string what = "the pages and tables of one more sequence";
    KVSWAP_RETURN_IF_ERROR(ledger_.check(one.pages + one.tables + one.scratch, what));
    auto created = SequencePages::create(options_, record_bytes(), *space_);
    if (!created.is_ok()) return created.status();
    spare_.push_back(std::move(created.value()));
    KVSWAP_RETURN_IF_ERROR(ledger_.charge(Use::kPages, one.pages, what));
    KVSWAP_RETURN_IF_ERROR(ledger_.charge(Use::kTables, one.tables, what));
    KVSWAP_RETURN_IF_ERROR(ledger_.charge(Use::kScratch, one.scratch, what));
  }
  return Status::ok();
}

void Engine::release_spare(int64_t count) {
  const MemoryNeed one = memory_need(options_, record_bytes(), 1, 0);
  while (static_cast<int64_t>(spare_.size()) > count) {
    spare_.pop_back();
    ledger_.release(Use::kPages, one.pages);
    ledger_.release(Use::kTables, one.tables);
    ledger_.release(Use::kScratch, one.scratch);
  }
}

Status Engine::reserve_space(int64_t batch, int64_t groups) {
  if (!options_.device) return Status::ok();
  const int64_t unit = groups_unit(options_);
  batch = std::max(batch, reserved_batch_);
  groups = std::max((groups + unit - 1) / unit * unit, reserved_groups_);
  if (batch == reserved_batch_ && groups == reserved_groups_) return Status::ok();
  const DeviceNeed need = device_need(options_, record_bytes(), batch, groups);
  const int64_t device = need.device - ledger_.used(Use::kDevice);
  const int64_t pinned = need.pinned - ledger_.used(Use::kPinned);
  const std::string what = "what " + std::to_string(batch) + " sequences of " +
                           std::to_string(groups) + " groups need beside their pages";
  KVSWAP_RETURN_IF_ERROR(ledger_.check(device + pinned, what));
  KVSWAP_RETURN_IF_ERROR(ledger_.charge(Use::kDevice, device, what));
  KVSWAP_RETURN_IF_ERROR(ledger_.charge(Use::kPinned, pinned, what));
  reserved_batch_ = batch;
  reserved_groups_ = groups;
  return space_->reserve(batch, groups);
}

Status Engine::declare(int64_t batch, int64_t tokens, const bool* valid) {
  KVSWAP_RETURN_IF_ERROR(check_process());
  settle_choice();
  if (sequences_.empty()) {
    KVSWAP_RETURN_IF_ERROR(begin(batch, tokens));
  }
  if (batch != this->batch()) {
    return Status::invalid("declare: the mask must be for the session's batch of " +
                           std::to_string(this->batch()) + ", got " + std::to_string(batch));
  }
  int64_t columns = 0;
  for (const Layer& layer : layers_) columns = std::max(columns, layer.columns);
  for (int64_t sequence = 0; sequence < batch; ++sequence) {
    TokenValidity& validity = validity_[sequence];
    if (validity.columns() > columns) validity.truncate(columns);
    validity.append(tokens, valid + sequence * tokens);
  }
  return Status::ok();
}

Status Engine::begin(int64_t batch, int64_t tokens) {
  if (batch < 1) {
    return Status::invalid("session: batch must be at least 1, got " + std::to_string(batch));
  }
  if (options_.max_batch > 0 && batch > options_.max_batch) {
    return Status::invalid("session: batch must be at most max_batch (" +
                           std::to_string(options_.max_batch) + "), got " + std::to_string(batch));
  }
  const int64_t context = std::max(tokens, options_.max_context);
  KVSWAP_RETURN_IF_ERROR(check_room(batch, context));
  release_spare(batch);
  KVSWAP_RETURN_IF_ERROR(reserve_space(batch, options_.sealed_groups(context)));
  KVSWAP_RETURN_IF_ERROR(allocate(batch));
  validity_.assign(batch, {});
  store_->set_sequences(batch);
  selector_->set_sequences(batch);
  return Status::ok();
}

void Engine::reset() {
  settle_choice();
  drop_steps();
  // An error is kept by the writer, and told by the next call that writes.
  (void)settle_seals().is_ok();
  prepared_ = -1;
  for (auto& sequence : sequences_) {
    sequence->clear();
    spare_.push_back(std::move(sequence));
  }
  sequences_.clear();
  validity_.clear();
  store_->clear();
  selector_->clear();
  for (Layer& layer : layers_) {
    layer.columns = layer.sealed_groups = 0;
    layer.step.chosen.clear();
    layer.step.overriding.clear();
  }
  ledger_.release(Use::kScratch, scored_bytes_);
  scored_bytes_ = 0;
  settle_charges();
}

uint64_t Engine::mask(int64_t layer, int64_t sequence, int64_t group) const {
  const int64_t first = group * options_.group_tokens;
  const int64_t count = std::min(options_.group_tokens, layers_[layer].columns - first);
  return validity_[sequence].mask(first, count);
}

}  // namespace kvswap
