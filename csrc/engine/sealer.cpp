#include "engine/sealer.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "io/stopwatch.h"

namespace kvswap {

Status Sealer::seal_overflow(int64_t layer) {
  while (batch_.due_groups(layer, batch_.layer(layer).columns) > 0) {
    const Status sealed = seal_from_tail(layer);
    if (!sealed.is_ok()) {
      // A part of the batch may be sealed: all of it or nothing.
      take_back(layer, batch_.layer(layer).sealed_groups);
      return sealed;
    }
  }
  return Status::ok();
}

Status Sealer::seal_from_tail(int64_t layer) {
  const Stopwatch watch(parts_.timeline.get(), {.kind = SpanKind::kSeal, .layer = layer});
  const int64_t run_max = parts_.store->run_records_max();
  for (int64_t first = 0; first < batch_.size(); first += run_max) {
    KVSWAP_RETURN_IF_ERROR(
        seal_run_from_tail(layer, first, std::min(run_max, batch_.size() - first)));
  }
  parts_.counters.records_sealed += batch_.size();
  ++batch_.layer(layer).sealed_groups;
  return Status::ok();
}

/// The next group of `count` sequences.
Status Sealer::seal_run_from_tail(int64_t layer, int64_t first_sequence, int64_t count) {
  const int64_t group = batch_.layer(layer).sealed_groups;
  auto staged = stage(layer, count);
  if (!staged.is_ok()) return staged.status();
  std::byte* records = parts_.space->outbox().at(staged.value());
  std::vector<int64_t> sequences(count);
  std::iota(sequences.begin(), sequences.end(), first_sequence);
  Status summarised;
  for (int64_t i = 0; i < count; ++i) {
    const std::byte* page = tail_.page(layer, sequences[i], group);
    parts_.space->compute().copy(records + i * parts_.record_bytes(), page,
                                 parts_.options.payload_bytes());
    pin_if_sink(layer, sequences[i], group, page);
    if (parts_.selector->is_ready(layer) && summarised.is_ok()) {
      summarised = parts_.selector->append({.layer = layer,
                                            .sequence = sequences[i],
                                            .keys = keys_of(page),
                                            .tokens = parts_.options.group_tokens,
                                            .valid = &batch_.validity(sequences[i])});
    }
  }
  KVSWAP_RETURN_IF_ERROR(commit(std::move(staged.value()), sequences));
  return summarised;
}

Status Sealer::seal_directly(int64_t layer, const KeyValueView& tokens, int64_t first_token,
                             int64_t groups) {
  const Stopwatch watch(parts_.timeline.get(), {.kind = SpanKind::kSeal, .layer = layer});
  const EngineOptions& options = parts_.options;
  const int64_t sealed = batch_.layer(layer).sealed_groups;
  const int64_t run_max = parts_.store->run_records_max();
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    for (int64_t done = 0; done < groups; done += run_max) {
      KVSWAP_RETURN_IF_ERROR(seal_run_of_chunk(layer, sequence, sealed + done,
                                               std::min(run_max, groups - done), tokens,
                                               first_token + done * options.group_tokens));
    }
    if (parts_.selector->is_ready(layer)) {
      const int64_t first_key = tokens.first_key(sequence) + first_token * tokens.key_token_stride;
      const KeyView keys = {
          static_cast<const std::byte*>(tokens.keys) + first_key * dtype_bytes(options.dtype),
          tokens.key_head_stride, tokens.key_token_stride, options.dtype};
      KVSWAP_RETURN_IF_ERROR(parts_.selector->append({.layer = layer,
                                                      .sequence = sequence,
                                                      .keys = keys,
                                                      .tokens = groups * options.group_tokens,
                                                      .valid = &batch_.validity(sequence)}));
    }
  }
  parts_.counters.records_sealed += batch_.size() * groups;
  batch_.layer(layer).sealed_groups += groups;
  return Status::ok();
}

/// `count` groups of one sequence.
Status Sealer::seal_run_of_chunk(int64_t layer, int64_t sequence, int64_t first_group,
                                 int64_t count, const KeyValueView& tokens, int64_t first_token) {
  auto staged = stage(layer, count);
  if (!staged.is_ok()) return staged.status();
  pack(staged.value(), tokens, sequence, first_token);
  const std::byte* records = parts_.space->outbox().at(staged.value());
  for (int64_t i = 0; i < count; ++i) {
    pin_if_sink(layer, sequence, first_group + i, records + i * parts_.record_bytes());
  }
  return commit(std::move(staged.value()), std::vector<int64_t>(count, sequence));
}

void Sealer::pack(const RecordStore::StagedRun& run, const KeyValueView& tokens, int64_t sequence,
                  int64_t first_token) {
  std::vector<void*> records(run.count);
  std::vector<int64_t> first_tokens(run.count);
  const std::vector<int32_t> sequences(run.count, static_cast<int32_t>(sequence));
  std::byte* outbox = parts_.space->outbox().at(run);
  for (int64_t i = 0; i < run.count; ++i) {
    records[i] = outbox + i * parts_.record_bytes();
    first_tokens[i] = first_token + i * parts_.options.group_tokens;
  }
  cuda::BatchTransferArgs transfer = transfer_of(parts_.options, tokens);
  transfer.records = records.data();
  transfer.sequences = sequences.data();
  transfer.first_tokens = first_tokens.data();
  transfer.count = run.count;
  parts_.space->compute().pack(transfer);
}

void Sealer::pin_if_sink(int64_t layer, int64_t sequence, int64_t group, const std::byte* record) {
  if (!batch_.is_sink(sequence, group)) return;
  SequencePages& pages = batch_.pages(sequence);
  std::vector<int32_t>& sinks = pages.sinks(layer);
  const int32_t page = pages.sink_page(layer, static_cast<int64_t>(sinks.size()));
  parts_.space->compute().copy(pages.pool().page(page), record, parts_.options.payload_bytes());
  sinks.push_back(static_cast<int32_t>(group));
}

KeyView Sealer::keys_of(const std::byte* record) const {
  const EngineOptions& options = parts_.options;
  return {record, 2 * options.group_tokens * options.head_dim, options.head_dim, options.dtype};
}

void Sealer::take_back(int64_t layer, int64_t groups) {
  // The writer keeps an error: the next call that writes reports it.
  (void)settle().is_ok();
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    std::erase_if(batch_.pages(sequence).sinks(layer),
                  [&](int32_t group) { return group >= groups; });
  }
  parts_.store->truncate(layer, groups);
  parts_.selector->truncate(layer, groups * parts_.options.group_tokens);
  batch_.layer(layer).sealed_groups = groups;
  account_.settle(batch_);
}

/// A run to fill. Those on their way from a device keep their buffers: one is left for this.
Result<RecordStore::StagedRun> Sealer::stage(int64_t layer, int64_t count) {
  if (static_cast<int64_t>(sent_.size()) == kWriteBuffers) {
    KVSWAP_RETURN_IF_ERROR(hand_over_oldest());
  }
  return parts_.store->stage(layer, count);
}

/// The run is packed: its records are sealed, and go to the disk once they have come from there.
Status Sealer::commit(RecordStore::StagedRun run, std::span<const int64_t> sequences) {
  parts_.store->enter(run, sequences);
  const Outbox::Sent sent = parts_.space->outbox().send(run, run.count * parts_.record_bytes());
  sent_.push_back(std::move(run));
  return sent == Outbox::Sent::kArrived ? hand_over_oldest() : Status::ok();
}

Status Sealer::hand_over_oldest() {
  const RecordStore::StagedRun run = std::move(sent_.front());
  sent_.pop_front();
  const Status arrived = parts_.space->outbox().arrive(run);
  const Status handed_over = parts_.store->hand_over(run);
  return arrived.is_ok() ? handed_over : arrived;
}

Status Sealer::settle() {
  Status settled;
  while (!sent_.empty()) {
    Status handed_over = hand_over_oldest();
    if (settled.is_ok()) settled = std::move(handed_over);
  }
  return settled;
}

Status Sealer::settle_layer(int64_t layer) {
  for (const RecordStore::StagedRun& run : sent_) {
    if (run.layer == layer) return settle();
  }
  return Status::ok();
}

}  // namespace kvswap
