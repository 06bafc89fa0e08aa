#include "engine/backend/device_compute.h"

#include <utility>

namespace kvswap {

Status DeviceCompute::open() {
  std::vector<Event*> events = {&tokens_, &packed_, &copied_};
  for (Event& event : attended_) events.push_back(&event);
  return make_events(device_, events);
}

Status DeviceCompute::reserve(int64_t scratch_bytes, int64_t mass_bytes) {
  for (const auto& [memory, bytes] : {std::pair{&scratch_, scratch_bytes}, {&mass_, mass_bytes}}) {
    *memory = {};
    auto allocated = DeviceBytes::allocate(device_, bytes);
    if (!allocated.is_ok()) return allocated.status();
    *memory = std::move(allocated.value());
  }
  return Status::ok();
}

void DeviceCompute::pack(const cuda::BatchTransferArgs& args) {
  const auto room = [&](const void* table, int64_t size) {
    return table == nullptr ? 0 : UploadRing::padded(args.count * size);
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
  device_.launch(on_device);
}

void DeviceCompute::encode(const RecordCodecArgs& args) {
  auto tables = tables_->open(2 * UploadRing::padded(args.count * int64_t{sizeof(void*)}));
  RecordCodecArgs on_device = args;
  on_device.from = tables.add(args.from, args.count);
  on_device.to = tables.add(args.to, args.count);
  tables.send();
  device_.launch(on_device);
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
  return wait_for_host();
}

Status DeviceCompute::upload_pages(std::span<std::byte* const> pages, const std::byte* host,
                                   int64_t bytes) {
  for (std::byte* page : pages) {
    device_.copy_in(page, host, bytes);
    host += bytes;
  }
  return wait_for_host();
}

Result<const std::byte*> DeviceCompute::map_for_host(const std::byte* from, int64_t bytes,
                                                     std::vector<std::byte>& room) {
  room.resize(bytes);
  KVSWAP_RETURN_IF_ERROR(download(room.data(), from, bytes));
  return room.data();
}

/// For what was queued on this stream.
Status DeviceCompute::wait_for_host() {
  device_.record(copied_);
  return device_.synchronize(copied_);
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

/// Its tables' copies on the device.
PagedAttentionArgs DeviceCompute::with_tables(const PagedAttentionArgs& args) {
  const int64_t entries = args.batch * args.table_heads * args.pages_max;
  const int64_t counts = args.batch * args.table_heads;
  const int64_t exponents = args.exponents == nullptr ? 0 : entries * args.shape.kv_heads * 2;
  const auto room = [](int64_t count, int64_t size) { return UploadRing::padded(count * size); };
  auto tables = tables_->open(room(entries, sizeof(void*)) + room(entries, sizeof(uint64_t)) +
                              room(entries, sizeof(int32_t)) + room(counts, sizeof(int32_t)) +
                              room(args.batch, sizeof(int32_t)) + room(exponents, 1));
  PagedAttentionArgs on_device = args;
  on_device.pages = tables.add(args.pages, entries);
  on_device.masks = tables.add(args.masks, entries);
  on_device.positions = tables.add(args.positions, entries);
  on_device.page_counts = tables.add(args.page_counts, counts);
  on_device.query_positions = tables.add(args.query_positions, args.batch);
  if (exponents > 0) on_device.exponents = tables.add(args.exponents, exponents);
  tables.send();
  return on_device;
}

void DeviceCompute::attend(int64_t layer, const PagedAttentionArgs& args) {
  device_.launch(AttentionCall{with_tables(args), scratch_.data()});
  device_.record(attended(layer));
}

Status DeviceCompute::weigh(const AttentionMassArgs& args) {
  const PagedAttentionArgs& attended = args.attention;
  const int64_t sums = attended.batch * attended.heads * attended.queries;
  const int64_t slots =
      attended.batch * attended.kv_heads() * attended.pages_max * attended.shape.group_tokens;
  const int64_t bytes = slots * int64_t{sizeof(float)};
  AttentionMassArgs on_device = {.attention = with_tables(attended)};
  on_device.mean = log_sum_exps(nullptr) + sums;
  if (args.square != nullptr) on_device.square = on_device.mean + slots;
  KVSWAP_ASSERT((sums + (args.square == nullptr ? 1 : 2) * slots) * int64_t{sizeof(float)} <=
                mass_.size());
  device_.launch(on_device);
  device_.copy_out(args.mean, on_device.mean, bytes);
  if (args.square != nullptr) device_.copy_out(args.square, on_device.square, bytes);
  return wait_for_host();
}

}  // namespace kvswap
