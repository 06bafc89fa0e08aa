#include "engine/device_space.h"

#include <algorithm>
#include <vector>

namespace kvswap {

Result<std::unique_ptr<DeviceSpace>> DeviceSpace::create(const EngineOptions& options,
                                                         int64_t record_bytes,
                                                         std::span<std::byte> staging) {
  auto device = options.device->make();
  if (!device.is_ok()) return device.status();
  std::unique_ptr<DeviceSpace> space(
      new DeviceSpace(options, record_bytes, std::move(device.value()), staging));
  KVSWAP_RETURN_IF_ERROR(space->open());
  return space;
}

DeviceSpace::DeviceSpace(const EngineOptions& options, int64_t record_bytes,
                         std::unique_ptr<Device> device, std::span<std::byte> staging)
    : options_(options),
      record_bytes_(record_bytes),
      device_(std::move(device)),
      staging_(staging),
      lanes_(*device_),
      attended_(options.layers),
      sent_(kWriteBuffers),
      needs_(options.layers),
      has_(options.layers),
      is_wait_timed_(options.layers, false) {}

DeviceSpace::~DeviceSpace() {
  // Whoever closes a session has been told of errors by the calls before.
  (void)device_->drain().is_ok();
  if (is_staging_pinned_) device_->unpin(staging_.data(), static_cast<int64_t>(staging_.size()));
}

Status DeviceSpace::open() {
  std::vector<Event*> events = {&tokens_, &packed_, &sealed_};
  for (auto* each : {&attended_, &sent_, &needs_, &has_}) {
    for (Event& event : *each) events.push_back(&event);
  }
  for (Event* event : events) {
    auto made = device_->make_event();
    if (!made.is_ok()) return made.status();
    *event = made.value();
  }
  KVSWAP_RETURN_IF_ERROR(lanes_.open());
  KVSWAP_RETURN_IF_ERROR(device_->pin(staging_.data(), static_cast<int64_t>(staging_.size())));
  is_staging_pinned_ = true;
  auto outbox =
      DeviceBytes::allocate(*device_, device_room(options_, record_bytes_, 0, 0).outbox_bytes);
  if (!outbox.is_ok()) return outbox.status();
  outbox_ = std::move(outbox.value());
  return Status::ok();
}

Result<PagePool> DeviceSpace::make_pool(int64_t pages, int64_t page_bytes) {
  auto memory = DeviceBytes::allocate(*device_, pages * page_bytes);
  if (!memory.is_ok()) return memory.status();
  const auto owner = std::make_shared<DeviceBytes>(std::move(memory.value()));
  return PagePool(std::shared_ptr<std::byte>(owner, owner->data()), pages, page_bytes);
}

Result<std::shared_ptr<std::byte>> DeviceSpace::make_landing(int64_t bytes) {
  auto pinned = PinnedBytes::allocate(*device_, bytes);
  if (!pinned.is_ok()) return pinned.status();
  const auto owner = std::make_shared<PinnedBytes>(std::move(pinned.value()));
  return std::shared_ptr<std::byte>(owner, owner->data());
}

std::unique_ptr<LowRankSelector> DeviceSpace::make_selector(const LowRankOptions& options) {
  auto selector = std::make_unique<DeviceSelector>(*device_, options);
  selector_ = selector.get();
  return selector;
}

Status DeviceSpace::reserve(int64_t batch, int64_t groups) {
  batch = std::max(batch, batch_);
  groups = std::max(groups, groups_);
  if (batch == batch_ && groups == groups_) return Status::ok();
  KVSWAP_RETURN_IF_ERROR(device_->drain());
  if (batch > batch_) KVSWAP_RETURN_IF_ERROR(reserve_lanes(batch));
  KVSWAP_RETURN_IF_ERROR(reserve_tables(batch, groups));
  batch_ = batch;
  groups_ = groups;
  return Status::ok();
}

Status DeviceSpace::reserve_lanes(int64_t batch) {
  const DeviceRoom room = device_room(options_, record_bytes_, batch, 0);
  const int64_t bytes = room.lane_records * record_bytes_;
  lane_memory_ = {};
  auto pinned = PinnedBytes::allocate(*device_, LandingLanes::kLanes * bytes);
  if (!pinned.is_ok()) return pinned.status();
  lane_memory_ = std::move(pinned.value());
  lanes_.reserve(lane_memory_.data(), room.lane_records, record_bytes_);
  landing_ = {};
  auto landing = DeviceBytes::allocate(*device_, bytes);
  if (!landing.is_ok()) return landing.status();
  landing_ = std::move(landing.value());
  return Status::ok();
}

Status DeviceSpace::reserve_tables(int64_t batch, int64_t groups) {
  const DeviceRoom room = device_room(options_, record_bytes_, batch, groups);
  const int64_t tables = TableRing::kSegments * room.segment_bytes;
  tables_.reset();
  table_memory_ = {};
  scratch_ = {};
  auto pinned = PinnedBytes::allocate(*device_, tables + DeviceSelector::answer_bytes(room.choice));
  if (!pinned.is_ok()) return pinned.status();
  table_memory_ = std::move(pinned.value());
  auto ring = TableRing::create(*device_, table_memory_.data(), room.segment_bytes);
  if (!ring.is_ok()) return ring.status();
  tables_ = std::move(ring.value());
  auto scratch = DeviceBytes::allocate(*device_, room.scratch_bytes);
  if (!scratch.is_ok()) return scratch.status();
  scratch_ = std::move(scratch.value());
  return selector_->reserve(options_.device->scratch, room.choice, tables_.get(),
                            table_memory_.data() + tables);
}

Status DeviceSpace::publish(Fetch& fetch) {
  if (fetch.lane < 0) return Status::ok();
  const auto layer = static_cast<size_t>(fetch.layer);
  std::vector<std::byte*> pages;
  for (const Load& load : fetch.loads) pages.push_back(load.home);
  const Event copied = lanes_.copied(fetch);
  {
    const Device::On load(*device_, Stream::kLoad);
    device_->wait(attended_[layer]);
    const auto bytes = static_cast<int64_t>(pages.size() * sizeof(std::byte*));
    auto tables = tables_->open(TableRing::padded(bytes));
    std::byte* const* on_device = tables.add(pages);
    tables.send();
    lanes_.copy(fetch, landing_.data(), on_device);
  }
  counters_.copied_bytes += pages.size() * record_bytes_;
  if (is_wait_timed_[layer]) {
    // A step old: done, as a rule.
    KVSWAP_RETURN_IF_ERROR(device_->synchronize(has_[layer]));
    counters_.device_wait_seconds += device_->seconds_between(needs_[layer], has_[layer]);
  }
  device_->record(needs_[layer]);
  device_->wait(copied);
  device_->record(has_[layer]);
  is_wait_timed_[layer] = true;
  lanes_.release(fetch);
  return Status::ok();
}

void DeviceSpace::pack(const cuda::BatchTransferArgs& args) {
  const auto room = [&](const void* table, int64_t size) {
    return table == nullptr ? 0 : TableRing::padded(args.count * size);
  };
  auto tables =
      tables_->open(room(args.records, sizeof(void*)) + room(args.sequences, sizeof(int32_t)) +
                    room(args.first_tokens, sizeof(int64_t)) + room(args.slots, sizeof(int32_t)) +
                    room(args.lengths, sizeof(int32_t)));
  const auto add = [&](auto* table) {
    return table == nullptr ? nullptr : tables.add(table, args.count);
  };
  cuda::BatchTransferArgs on_device = args;
  on_device.records = add(args.records);
  on_device.sequences = add(args.sequences);
  on_device.first_tokens = add(args.first_tokens);
  on_device.slots = add(args.slots);
  on_device.lengths = add(args.lengths);
  tables.send();
  device_->pack_records(on_device);
}

void DeviceSpace::copy(std::byte* to, const std::byte* from, int64_t bytes) {
  device_->copy(to, from, bytes);
}

Status DeviceSpace::upload(std::byte* to, const std::byte* host, int64_t bytes) {
  device_->copy_in(to, host, bytes);
  return device_->drain();
}

Status DeviceSpace::download(std::byte* host, const std::byte* from, int64_t bytes) {
  device_->copy_out(host, from, bytes);
  return device_->drain();
}

std::byte* DeviceSpace::outbox(const RecordStore::StagedRun& run) {
  return outbox_.data() + (run.data() - staging_.data());
}

void DeviceSpace::send(const RecordStore::StagedRun& run, int64_t bytes) {
  device_->record(sealed_);
  const Device::On write(*device_, Stream::kWrite);
  device_->wait(sealed_);
  device_->copy_out(run.data(), outbox(run), bytes);
  device_->record(sent_[run.buffer.index]);
}

Status DeviceSpace::arrive(const RecordStore::StagedRun& run) {
  return device_->synchronize(sent_[run.buffer.index]);
}

void DeviceSpace::mark_tokens() { device_->record(tokens_); }

void DeviceSpace::begin_chunk() {
  chunk_.emplace(*device_, Stream::kWrite);
  device_->wait(tokens_);
}

void DeviceSpace::end_chunk() {
  device_->record(packed_);
  chunk_.reset();
  device_->wait(packed_);
}

void DeviceSpace::attend(int64_t layer, const PagedAttentionArgs& args) {
  const int64_t entries = args.batch * args.table_heads * args.pages_max;
  const int64_t counts = args.batch * args.table_heads;
  const auto room = [](int64_t count, int64_t size) { return TableRing::padded(count * size); };
  auto tables = tables_->open(room(entries, sizeof(void*)) + room(entries, sizeof(uint64_t)) +
                              room(entries, sizeof(int32_t)) + room(counts, sizeof(int32_t)) +
                              room(args.batch, sizeof(int32_t)));
  PagedAttentionArgs on_device = args;
  on_device.pages = tables.add(args.pages, entries);
  on_device.masks = tables.add(args.masks, entries);
  on_device.columns = tables.add(args.columns, entries);
  on_device.page_counts = tables.add(args.page_counts, counts);
  on_device.query_columns = tables.add(args.query_columns, args.batch);
  tables.send();
  device_->paged_attention(on_device, scratch_.data());
  device_->record(attended_[layer]);
}

SpaceCounters DeviceSpace::counters() {
  counters_.copy_seconds = lanes_.copy_seconds();
  counters_.choice_wait_seconds = selector_->wait_seconds();
  return counters_;
}

}  // namespace kvswap
