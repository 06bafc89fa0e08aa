#include "engine/backend/fetcher.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "io/stopwatch.h"

namespace kvswap {

Result<std::unique_ptr<Fetcher>> Fetcher::create(std::unique_ptr<BlockReader> reader,
                                                 RecordStore* store, const Options& options) {
  auto discard_buffer = AlignedBytes::allocate(options.merge_gap_bytes, options.scrap_at_end);
  if (!discard_buffer.is_ok()) return discard_buffer.status();
  return std::unique_ptr<Fetcher>(
      new Fetcher(std::move(reader), store, options, std::move(discard_buffer.value())));
}

Fetcher::Fetcher(std::unique_ptr<BlockReader> reader, RecordStore* store, const Options& options,
                 AlignedBytes discard_buffer)
    : scrap_(std::move(discard_buffer)),
      reader_(std::move(reader)),
      store_(store),
      options_(options) {}

void Fetcher::abandon(Fetch& fetch, std::shared_ptr<void> memory) {
  fetch.is_unverified = false;
  if (fetch.ticket == 0) return;
  abandoned_.push_back({std::exchange(fetch.ticket, 0), std::move(memory)});
}

Status Fetcher::drain_abandoned() {
  while (!abandoned_.empty()) {
    Status landed = reader_->wait(abandoned_.back().ticket);
    if (landed.is_pending()) return landed;
    abandoned_.pop_back();
  }
  return Status::ok();
}

Status Fetcher::submit(Fetch& fetch) {
  KVSWAP_ASSERT(fetch.ticket == 0 && !fetch.is_unverified);
  if (fetch.loads.empty()) return Status::ok();
  KVSWAP_RETURN_IF_ERROR(drain_abandoned());
  const int64_t began_ns = options_.timeline != nullptr ? Timeline::now_ns() : 0;
  fetch.placements.clear();
  for (Load& load : fetch.loads) {
    KVSWAP_RETURN_IF_ERROR(store_->ensure_written(fetch.layer, load.sequence, load.group));
    load.is_ready = false;
    fetch.placements.push_back({store_->offset_bytes(fetch.layer, load.sequence, load.group),
                                store_->form().stored_bytes, landing_of(fetch, load)});
  }
  drop_repeats(fetch);
  fetch.merged.build(fetch.placements, {.gap_bytes_max = options_.merge_gap_bytes,
                                        .merged_bytes_max = options_.merge_bytes_max,
                                        .discard_buffer = scrap_.data()});
  auto ticket = reader_->submit(fetch.merged.reads());
  if (!ticket.is_ok()) return ticket.status();
  fetch.ticket = ticket.value();
  fetch.submitted_ns = Timeline::now_ns();
  record(SpanKind::kSubmit, fetch, began_ns, fetch.submitted_ns);
  return Status::ok();
}

void Fetcher::record(SpanKind kind, const Fetch& fetch, int64_t begin_ns, int64_t end_ns) {
  if (options_.timeline == nullptr) return;
  options_.timeline->record(
      {.kind = kind,
       .layer = fetch.layer,
       .ticket = fetch.ticket,
       .begin_ns = begin_ns,
       .end_ns = end_ns,
       .bytes = static_cast<int64_t>(fetch.loads.size()) * store_->form().stored_bytes});
}

void Fetcher::drop_repeats(Fetch& fetch) {
  auto& placements = fetch.placements;
  std::sort(placements.begin(), placements.end(),
            [](const Placement& a, const Placement& b) { return a.offset_bytes < b.offset_bytes; });
  fetch.copies.clear();
  size_t retained = 0;
  for (size_t i = 1; i < placements.size(); ++i) {
    if (placements[i].offset_bytes == placements[retained].offset_bytes) {
      fetch.copies.push_back({static_cast<const std::byte*>(placements[retained].target),
                              static_cast<std::byte*>(placements[i].target)});
    } else {
      placements[++retained] = placements[i];
    }
  }
  placements.resize(retained + 1);
}

Status Fetcher::finish(Fetch& fetch) {
  if (fetch.ticket != 0) KVSWAP_RETURN_IF_ERROR(complete(fetch));
  if (!fetch.is_unverified) return Status::ok();
  const Stopwatch watch(options_.timeline, {.kind = SpanKind::kLand, .layer = fetch.layer});
  Status verified = verify(fetch);
  if (!verified.is_pending()) fetch.is_unverified = false;
  return verified;
}

Status Fetcher::complete(Fetch& fetch) {
  const int64_t waits_from_ns = Timeline::now_ns();
  Status arrived = reader_->wait(fetch.ticket);
  const int64_t waits_to_ns = Timeline::now_ns();
  record(SpanKind::kWait, fetch, waits_from_ns, waits_to_ns);
  if (arrived.is_pending()) return arrived;
  fetch.ticket = 0;
  const bool is_again = std::exchange(fetch.is_unverified, false);
  KVSWAP_RETURN_IF_ERROR(arrived);
  fetch.is_unverified = true;
  counters_.wait_seconds += 1e-9 * static_cast<double>(waits_to_ns - waits_from_ns);
  if (is_again) return Status::ok();  // of a record that reread() asked for
  counters_.hidden_seconds += 1e-9 * static_cast<double>(waits_from_ns - fetch.submitted_ns);
  counters_.records += fetch.loads.size();
  counters_.payload_bytes += fetch.loads.size() * store_->form().stored_bytes;
  counters_.gap_bytes += fetch.merged.gap_bytes();
  const Stopwatch watch(options_.timeline, {.kind = SpanKind::kLand, .layer = fetch.layer});
  for (const Fetch::Copy& copy : fetch.copies) {
    std::memcpy(copy.target, copy.source, store_->form().stored_bytes);
  }
  return Status::ok();
}

Status Fetcher::verify(Fetch& fetch) {
  const auto count = static_cast<int64_t>(fetch.loads.size());
  std::atomic<int64_t> failed = 0;
  const auto check = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (!take(fetch, fetch.loads[i])) ++failed;
    }
  };
  const int64_t piece = store_->form().packing != nullptr ? 4 : 32;
  options_.parallel != nullptr ? (*options_.parallel)(count, piece, check)
                               : serial_for(count, piece, check);
  if (failed == 0) return Status::ok();
  for (Load& load : fetch.loads) {
    if (!load.is_ready) KVSWAP_RETURN_IF_ERROR(reread(fetch, load));
  }
  return Status::ok();
}

/// Where the file's bytes land: a record that is packed there is shorter than its target.
std::byte* Fetcher::landing_of(const Fetch& fetch, const Load& load) const {
  return fetch.stays_packed
             ? load.target
             : load.target + (store_->form().record_bytes - store_->form().stored_bytes);
}

/// Does the checksum hold? Then the record is unpacked.
bool Fetcher::take(const Fetch& fetch, Load& load) const {
  if (load.is_ready) return true;
  const std::byte* landed = landing_of(fetch, load);
  if (!store_->verify(fetch.layer, load.sequence, load.group, landed)) return false;
  load.is_ready = true;
  const RecordPacking* packing = store_->form().packing.get();
  if (packing == nullptr || fetch.stays_packed) return true;
  thread_local std::vector<std::byte> packed;
  packed.assign(landed, landed + packing->payload_bytes());
  packing->unpack(packed.data(), load.target);
  return true;
}

Status Fetcher::reread(Fetch& fetch, Load& load) {
  ++counters_.reread_records;
  const int64_t offset = store_->offset_bytes(fetch.layer, load.sequence, load.group);
  const iovec target = {landing_of(fetch, load), static_cast<size_t>(store_->form().stored_bytes)};
  const BlockRead again = {offset, {&target, 1}};
  auto ticket = reader_->submit({&again, 1});
  if (!ticket.is_ok()) return ticket.status();
  Status arrived = reader_->wait(ticket.value());
  if (arrived.is_pending()) {
    fetch.ticket = ticket.value();  // finish() waits for it first
    return arrived;
  }
  KVSWAP_RETURN_IF_ERROR(arrived);
  if (take(fetch, load)) return Status::ok();
  const std::string& directory = options_.file->directory_of(offset);
  return Status::corrupt(
      "read of layer " + std::to_string(fetch.layer) + ", group " + std::to_string(load.group) +
          ", sequence " + std::to_string(load.sequence) + " from the file in " + directory +
          " at offset " + std::to_string(options_.file->place_of(offset).offset_bytes) +
          ": the checksum must hold, and did not in two reads; the disk or its memory returns "
          "wrong bytes, nothing of it was used",
      directory);
}

}  // namespace kvswap
