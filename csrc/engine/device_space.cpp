#include "engine/device_space.h"

#include <algorithm>
#include <vector>

#include "engine/memory_need.h"
#include "methods/device_selector.h"

namespace kvswap {
namespace {

void wipe(Device& device, const DeviceBytes& bytes) {
  constexpr int64_t kCopyBytes = 1 << 20;
  const std::vector<std::byte> zeros(kCopyBytes);
  // What is queued may write there. Errors were reported by the calls before this one.
  (void)device.drain().is_ok();
  const Device::On on(device, Stream::kCompute);
  for (int64_t at = 0; at < bytes.size(); at += kCopyBytes) {
    device.copy_in(bytes.data() + at, zeros.data(), std::min(kCopyBytes, bytes.size() - at));
  }
  (void)device.drain().is_ok();
}

}  // namespace

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
      compute_(*device_, tables_, page_layers(options)),
      landing_(*device_, tables_, compute_, options.layers, record_bytes, options.memory_at_end()),
      outbox_(*device_, staging, kWriteBuffers, outbox_note_bytes(options, record_bytes)) {}

DeviceSpace::~DeviceSpace() {
  // Errors were reported by the calls before this one.
  (void)device_->drain().is_ok();
  outbox_.close();
}

Status DeviceSpace::open() {
  KVSWAP_RETURN_IF_ERROR(compute_.open());
  KVSWAP_RETURN_IF_ERROR(landing_.open());
  return outbox_.open();
}

Result<PagePool> DeviceSpace::make_pool(int64_t pages, int64_t page_bytes) {
  auto memory = DeviceBytes::allocate(*device_, pages * page_bytes);
  if (!memory.is_ok()) return memory.status();
  const auto end = [device = device_.get(), is_wiped = options_.wipe_on_close](DeviceBytes* bytes) {
    if (is_wiped) wipe(*device, *bytes);
    delete bytes;
  };
  const std::shared_ptr<DeviceBytes> owner(new DeviceBytes(std::move(memory.value())), end);
  return PagePool(std::shared_ptr<std::byte>(owner, owner->data()), pages, page_bytes);
}

Status DeviceSpace::reserve(int64_t batch, int64_t groups) {
  if (batch == batch_ && groups == groups_) return Status::ok();
  KVSWAP_RETURN_IF_ERROR(device_->drain());
  const DeviceRoom room = device_room(options_, record_bytes_, batch, groups);
  batch_ = groups_ = 0;  // until all of it is there, nothing is
  if (batch != landing_batch_) {
    landing_batch_ = 0;
    KVSWAP_RETURN_IF_ERROR(landing_.reserve(room.lane_records));
    landing_batch_ = batch;
  }
  KVSWAP_RETURN_IF_ERROR(reserve_tables(room));
  batch_ = batch;
  groups_ = groups;
  return Status::ok();
}

Status DeviceSpace::reserve_tables(const DeviceRoom& room) {
  const int64_t tables = TableRing::kSegments * room.segment_bytes;
  tables_.reset();
  table_memory_ = {};
  auto pinned = PinnedBytes::allocate(*device_, tables + DeviceSelector::answer_bytes(room.choice));
  if (!pinned.is_ok()) return pinned.status();
  table_memory_ = std::move(pinned.value());
  auto ring = TableRing::create(*device_, table_memory_.data(), room.segment_bytes);
  if (!ring.is_ok()) return ring.status();
  tables_ = std::move(ring.value());
  selection_place_ = {.room = room.choice,
                      .scratch = &options_.device->scratch,
                      .tables = tables_.get(),
                      .answer = table_memory_.data() + tables};
  return compute_.reserve(room.scratch_bytes, room.mass_bytes);
}

}  // namespace kvswap
