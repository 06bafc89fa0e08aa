#include "engine/backend/device_backend.h"

#include <algorithm>
#include <vector>

#include "engine/backend/staging_buffers.h"
#include "methods/selection/device_selector.h"

namespace kvswap {
namespace {

constexpr int64_t kSegmentLayers = 8;  // whose tables a segment of the ring holds
constexpr int64_t kSegmentBytesMax = 2 << 20;

int64_t padded(int64_t count, int64_t size) { return UploadRing::padded(count * size); }

int64_t attention_scratch_bytes(const Plan& plan, int64_t batch_max) {
  const EngineOptions& options = plan.options;
  int64_t most = 0;
  for (int64_t batch = 1; batch <= batch_max / options.heads_apart; ++batch) {
    for (int64_t queries = 1; queries <= options.select_queries_max; ++queries) {
      PagedAttentionArgs args;
      args.batch = batch;
      args.table_heads = options.heads_apart;
      args.heads = options.heads_apart * options.query_heads;
      args.queries = queries;
      args.pages_max = plan.pages_per_layer;
      args.shape = plan.record_shape;
      args.dtype = options.dtype;
      most = std::max(most, options.device->scratch.paged_attention(args));
    }
  }
  return most;
}

/// Notes of a run, that stand beside each write buffer.
int64_t outbox_note_bytes(const Plan& plan) {
  return plan.write_buffer_bytes / plan.record_bytes * plan.note_bytes;
}

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

DeviceRoom device_room(const Plan& plan, int64_t batch, int64_t groups) {
  const EngineOptions& options = plan.options;
  DeviceRoom room;
  room.lane_records = batch * options.pages_max;
  room.outbox_bytes = Plan::kWriteBuffers * plan.write_buffer_bytes;
  if (batch == 0) return room;
  const MethodOptions& method = plan.method;
  const SummaryKind& kind = plan.rows;
  const RowLayout layout(kind, method);
  if (plan.chooses_on_device) {
    room.choice = {.batch = batch,
                   .queries = options.select_queries_max,
                   .groups = groups,
                   .k = std::min(options.groups_max, options.pages_max),
                   .sinks = plan.sink_pages + plan.retention.tokens_max / options.group_tokens,
                   .rank = options.ranks.empty()
                               ? kind.shape(method, 0).width
                               : *std::max_element(options.ranks.begin(), options.ranks.end()),
                   .heads = method.score == Score::kSum ? 0 : options.query_heads,
                   .differs = plan.retention.shares_groups};
  }
  room.scratch_bytes = attention_scratch_bytes(plan, batch);
  room.mass_bytes =
      batch * plan.step_attention_bytes(std::max(plan.retention.step_numbers, plan.page_numbers()));
  const int64_t entries = batch * plan.pages_per_layer;
  const int64_t attention = padded(entries, sizeof(void*)) + padded(entries, sizeof(uint64_t)) +
                            padded(entries, sizeof(int32_t)) + 2 * padded(batch, sizeof(int32_t)) +
                            padded(entries, plan.page_note_bytes);
  const int64_t transfers =
      std::max(plan.write_buffer_bytes / plan.record_bytes, batch * plan.tail_pages);
  const int64_t packing = padded(transfers, sizeof(void*)) + padded(transfers, sizeof(int64_t)) +
                          3 * padded(transfers, sizeof(int32_t));
  // A chunk of a sequence, or a group of each.
  const DeviceEncoderKind* rows = kind.on_device;
  const int64_t sealing = rows == nullptr ? 0
                                          : std::max(rows->table_bytes(layout, 1, groups),
                                                     rows->table_bytes(layout, batch, 1));
  const int64_t landing = padded(room.lane_records, sizeof(void*));
  const int64_t choice = DeviceSelector::table_bytes(layout, room.choice);
  const int64_t largest = std::max({attention, packing, landing, choice, sealing});
  // Each segment that is left is marked on all its streams, and waited for when it is entered
  // again: once in some layers, not once or twice in each. A small budget must not be eaten by it.
  const int64_t of_layers =
      std::min(kSegmentLayers, options.layers) * (attention + packing + landing + choice);
  const int64_t most = options.kv_memory_bytes < 0
                           ? kSegmentBytesMax
                           : std::min(options.kv_memory_bytes / 256, kSegmentBytesMax);
  room.segment_bytes = std::max(largest, std::min(of_layers, most));
  return room;
}

void DeviceBackend::reserve(Arena& arena, const Plan& plan, int64_t batch, int64_t groups) {
  const DeviceRoom room = device_room(plan, batch, groups);
  const int64_t tables = UploadRing::kSegments * room.segment_bytes;
  const int64_t landing = room.lane_records * plan.record_bytes;
  const int64_t notes = Plan::kWriteBuffers * outbox_note_bytes(plan);
  arena.take(Use::kDevice,
             room.outbox_bytes + notes + landing + tables + room.scratch_bytes + room.mass_bytes);
  arena.take(Use::kPinned, StagingBuffers::kLanes * landing + tables + notes);
  if (room.choice.batch == 0) return;
  const RowLayout layout(plan.rows, plan.method);
  arena.take(Use::kDevice,
             DeviceSelector::device_bytes(plan.options.device->scratch, layout, room.choice));
  arena.take(Use::kPinned, DeviceSelector::answer_bytes(room.choice));
}

Result<std::unique_ptr<DeviceBackend>> DeviceBackend::create(const Plan& plan,
                                                             std::span<std::byte> staging) {
  auto device = plan.options.device->make();
  if (!device.is_ok()) return device.status();
  std::unique_ptr<DeviceBackend> space(new DeviceBackend(plan, std::move(device.value()), staging));
  KVSWAP_RETURN_IF_ERROR(space->open());
  return space;
}

DeviceBackend::DeviceBackend(const Plan& plan, std::unique_ptr<Device> device,
                             std::span<std::byte> staging)
    : plan_(plan),
      device_(std::move(device)),
      compute_(*device_, tables_, plan.page_layers),
      landing_(*device_, tables_, compute_, plan.record_bytes, plan.options.memory_at_end()),
      outbox_(*device_, staging, Plan::kWriteBuffers, outbox_note_bytes(plan)) {}

DeviceBackend::~DeviceBackend() {
  // Errors were reported by the calls before this one.
  (void)device_->drain().is_ok();
  outbox_.close();
}

Status DeviceBackend::open() {
  KVSWAP_RETURN_IF_ERROR(compute_.open());
  KVSWAP_RETURN_IF_ERROR(landing_.open());
  return outbox_.open();
}

Result<PagePool> DeviceBackend::make_pool(int64_t pages, int64_t page_bytes) {
  auto memory = DeviceBytes::allocate(*device_, pages * page_bytes);
  if (!memory.is_ok()) return memory.status();
  const auto end = [device = device_.get(),
                    is_wiped = plan_.options.wipe_on_close](DeviceBytes* bytes) {
    if (is_wiped) wipe(*device, *bytes);
    delete bytes;
  };
  const std::shared_ptr<DeviceBytes> owner(new DeviceBytes(std::move(memory.value())), end);
  return PagePool(std::shared_ptr<std::byte>(owner, owner->data()), pages, page_bytes);
}

Status DeviceBackend::reserve(int64_t batch, int64_t groups) {
  if (batch == batch_ && groups == groups_) return Status::ok();
  KVSWAP_RETURN_IF_ERROR(device_->drain());
  const DeviceRoom room = device_room(plan_, batch, groups);
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

Status DeviceBackend::reserve_tables(const DeviceRoom& room) {
  const int64_t tables = UploadRing::kSegments * room.segment_bytes;
  tables_.reset();
  table_memory_ = {};
  auto pinned =
      PinnedBuffer::allocate(*device_, tables + DeviceSelector::answer_bytes(room.choice));
  if (!pinned.is_ok()) return pinned.status();
  table_memory_ = std::move(pinned.value());
  auto ring = UploadRing::create(*device_, table_memory_.data(), room.segment_bytes);
  if (!ring.is_ok()) return ring.status();
  tables_ = std::move(ring.value());
  selection_place_ = {.room = room.choice,
                      .scratch = &plan_.options.device->scratch,
                      .tables = tables_.get(),
                      .answer = table_memory_.data() + tables};
  return compute_.reserve(room.scratch_bytes, room.mass_bytes);
}

}  // namespace kvswap
