#include "engine/device_compute.h"

namespace kvswap {

Status DeviceCompute::open() {
  std::vector<Event*> events = {&tokens_, &packed_};
  for (Event& event : attended_) events.push_back(&event);
  return make_events(device_, events);
}

Status DeviceCompute::reserve(int64_t scratch_bytes) {
  scratch_ = {};
  auto scratch = DeviceBytes::allocate(device_, scratch_bytes);
  if (!scratch.is_ok()) return scratch.status();
  scratch_ = std::move(scratch.value());
  return Status::ok();
}

void DeviceCompute::pack(const cuda::BatchTransferArgs& args) {
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
  device_.pack_records(on_device);
}

void DeviceCompute::copy(std::byte* to, const std::byte* from, int64_t bytes) {
  device_.copy(to, from, bytes);
}

Status DeviceCompute::upload(std::byte* to, const std::byte* host, int64_t bytes) {
  device_.copy_in(to, host, bytes);
  return device_.drain();
}

Status DeviceCompute::download(std::byte* host, const std::byte* from, int64_t bytes) {
  device_.copy_out(host, from, bytes);
  return device_.drain();
}

void DeviceCompute::mark_tokens() { device_.record(tokens_); }

void DeviceCompute::begin_chunk() {
  chunk_.emplace(device_, Stream::kWrite);
  device_.wait(tokens_);
}

void DeviceCompute::end_chunk() {
  device_.record(packed_);
  chunk_.reset();
  device_.wait(packed_);
}

void DeviceCompute::attend(int64_t layer, const PagedAttentionArgs& args) {
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
  device_.paged_attention(on_device, scratch_.data());
  device_.record(attended(layer));
}

}  // namespace kvswap
