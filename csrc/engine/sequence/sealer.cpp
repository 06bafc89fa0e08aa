#include "engine/sequence/sealer.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "engine/clusters/token_locator.h"
#include "io/stopwatch.h"

namespace kvswap {

void Sealer::reserve(Arena& arena, const Plan& plan) {
  arena.take(Use::kStaging, plan.encoded_at_once * plan.token_page_bytes);
}

Status Sealer::seal_overflow(int64_t layer) {
  while (batch_.due_groups(layer, batch_.layer(layer).positions) > 0) {
    const Status sealed = seal_from_tail(layer);
    if (!sealed.is_ok()) {
      // A part of the batch may be sealed: all of it or nothing.
      roll_back(layer, batch_.layer(layer).sealed_groups);
      return sealed;
    }
  }
  return Status::ok();
}

Status Sealer::seal_from_tail(int64_t layer) {
  const Stopwatch watch(context_.timeline.get(), {.kind = SpanKind::kSeal, .layer = layer});
  const int64_t run_max = context_.store->run_records_max();
  for (int64_t first = 0; first < batch_.size(); first += run_max) {
    KVSWAP_RETURN_IF_ERROR(
        seal_run_from_tail(layer, first, std::min(run_max, batch_.size() - first)));
  }
  context_.counters.records_sealed += batch_.size();
  ++batch_.layer(layer).sealed_groups;
  return Status::ok();
}

/// The next group of `count` sequences.
Status Sealer::seal_run_from_tail(int64_t layer, int64_t first_sequence, int64_t count) {
  const int64_t group = batch_.layer(layer).sealed_groups;
  auto staged = stage(layer, count);
  if (!staged.is_ok()) return staged.status();
  std::byte* records = context_.space->outbox().at(staged.value());
  std::vector<int64_t> sequences(count);
  std::iota(sequences.begin(), sequences.end(), first_sequence);
  const bool is_encoded = context_.plan.has_float8_records;
  const bool is_summarised = context_.selector->is_ready(layer);
  std::vector<const void*> pages;
  std::vector<SealedKeys> keys;
  for (int64_t i = 0; i < count; ++i) {
    const std::byte* page = batch_.pages(sequences[i]).tail_page(layer, group);
    pages.push_back(page);
    if (!is_encoded) {
      context_.space->compute().copy(records + i * context_.record_bytes(), page,
                                     context_.plan.payload_bytes);
    }
    pin_if_sink(layer, sequences[i], group, page);
    if (!is_summarised) continue;
    keys.push_back({.layer = layer,
                    .sequence = sequences[i],
                    .keys = keys_of(page),
                    .tokens = context_.options.group_tokens,
                    .valid = &batch_.validity(sequences[i])});
  }
  if (is_encoded) encode(staged.value(), 0, pages);
  const Status summarised = is_summarised ? context_.selector->append(keys) : Status::ok();
  KVSWAP_RETURN_IF_ERROR(commit(std::move(staged.value()), sequences));
  return summarised;
}

Status Sealer::seal_directly(int64_t layer, const KeyValueView& tokens, int64_t first_token,
                             int64_t groups) {
  const Stopwatch watch(context_.timeline.get(), {.kind = SpanKind::kSeal, .layer = layer});
  const EngineOptions& options = context_.options;
  const int64_t sealed = batch_.layer(layer).sealed_groups;
  const int64_t run_max = context_.store->run_records_max();
  if (context_.plan.has_float8_records && !unencoded_) KVSWAP_RETURN_IF_ERROR(make_unencoded());
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    for (int64_t done = 0; done < groups; done += run_max) {
      KVSWAP_RETURN_IF_ERROR(seal_run_of_chunk(layer, sequence, sealed + done,
                                               std::min(run_max, groups - done), tokens,
                                               first_token + done * options.group_tokens));
    }
    if (context_.selector->is_ready(layer)) {
      const int64_t first_key = tokens.first_key(sequence) + first_token * tokens.key_token_stride;
      const KeyView keys = {
          static_cast<const std::byte*>(tokens.keys) + first_key * dtype_bytes(options.dtype),
          tokens.key_head_stride, tokens.key_token_stride, options.dtype};
      KVSWAP_RETURN_IF_ERROR(context_.selector->append({.layer = layer,
                                                        .sequence = sequence,
                                                        .keys = keys,
                                                        .tokens = groups * options.group_tokens,
                                                        .valid = &batch_.validity(sequence)}));
    }
  }
  context_.counters.records_sealed += batch_.size() * groups;
  batch_.layer(layer).sealed_groups += groups;
  batch_.layer(layer).first_in_tail = batch_.layer(layer).sealed_groups;
  return Status::ok();
}

/// `count` groups of one sequence.
Status Sealer::seal_run_of_chunk(int64_t layer, int64_t sequence, int64_t first_group,
                                 int64_t count, const KeyValueView& tokens, int64_t first_token) {
  auto staged = stage(layer, count);
  if (!staged.is_ok()) return staged.status();
  const Piece piece = {layer, sequence, first_group, first_token, count};
  if (context_.plan.has_float8_records) {
    pack_and_encode(staged.value(), tokens, piece);
  } else {
    pack(tokens, piece, context_.space->outbox().at(staged.value()), context_.record_bytes());
  }
  return commit(std::move(staged.value()), std::vector<int64_t>(count, sequence));
}

void Sealer::pack(const KeyValueView& tokens, const Piece& piece, std::byte* pages,
                  int64_t stride) {
  std::vector<void*> records(piece.count);
  std::vector<int64_t> first_tokens(piece.count);
  const std::vector<int32_t> sequences(piece.count, static_cast<int32_t>(piece.sequence));
  for (int64_t i = 0; i < piece.count; ++i) {
    records[i] = pages + i * stride;
    first_tokens[i] = piece.first_token + i * context_.options.group_tokens;
  }
  cuda::BatchTransferArgs transfer = transfer_of(context_.plan, tokens);
  transfer.records = records.data();
  transfer.sequences = sequences.data();
  transfer.first_tokens = first_tokens.data();
  transfer.count = piece.count;
  context_.space->compute().pack(transfer);
  for (int64_t i = 0; i < piece.count; ++i) {
    pin_if_sink(piece.layer, piece.sequence, piece.first_group + i, pages + i * stride);
  }
}

/// As many groups at a time as there is memory for.
void Sealer::pack_and_encode(RecordStore::StagedRun& run, const KeyValueView& tokens,
                             const Piece& piece) {
  const EngineOptions& options = context_.options;
  const int64_t most = context_.plan.encoded_at_once;
  const int64_t page_bytes = context_.plan.token_page_bytes;
  for (int64_t done = 0; done < piece.count; done += most) {
    Piece next = piece;
    next.first_group += done;
    next.first_token += done * options.group_tokens;
    next.count = std::min(most, piece.count - done);
    pack(tokens, next, unencoded_->page(0), page_bytes);
    std::vector<const void*> pages(next.count);
    for (int64_t i = 0; i < next.count; ++i) pages[i] = unencoded_->page(static_cast<int32_t>(i));
    encode(run, done, pages);
  }
}

Status Sealer::make_unencoded() {
  auto pool =
      context_.space->make_pool(context_.plan.encoded_at_once, context_.plan.token_page_bytes);
  if (!pool.is_ok()) return pool.status();
  unencoded_ = std::make_unique<PagePool>(std::move(pool.value()));
  return Status::ok();
}

/// To the run's records from `first` on.
void Sealer::encode(RecordStore::StagedRun& run, int64_t first,
                    std::span<const void* const> pages) {
  const EngineOptions& options = context_.options;
  std::byte* outbox = context_.space->outbox().at(run);
  int8_t* notes = context_.space->outbox().notes_at(run);
  std::vector<void*> records(pages.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    records[i] = outbox + (first + static_cast<int64_t>(i)) * context_.record_bytes();
  }
  context_.space->compute().encode({.shape = context_.plan.record_shape,
                                    .dtype = options.dtype,
                                    .from = pages.data(),
                                    .to = records.data(),
                                    .exponents = notes + first * context_.plan.note_bytes,
                                    .count = static_cast<int64_t>(pages.size())});
}

void Sealer::pin_if_sink(int64_t layer, int64_t sequence, int64_t group, const std::byte* record) {
  if (!batch_.is_sink(sequence, group)) return;
  SequencePages& pages = batch_.pages(sequence);
  std::vector<int32_t>& sinks = pages.sinks(layer);
  std::byte* page = pages.sink_page(layer, static_cast<int64_t>(sinks.size()));
  context_.space->compute().copy(page, record, context_.plan.group_bytes);
  sinks.push_back(static_cast<int32_t>(group));
}

KeyView Sealer::keys_of(const std::byte* record) const {
  const EngineOptions& options = context_.options;
  return {record, context_.plan.record_shape.head_elements(), options.head_dim, options.dtype};
}

void Sealer::roll_back(int64_t layer, int64_t groups) {
  // The writer keeps an error: the next call that writes reports it.
  (void)drain().is_ok();
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    std::erase_if(batch_.pages(sequence).sinks(layer),
                  [&](int32_t group) { return group >= groups; });
    batch_.pages(sequence).retained(layer).truncate(
        {.positions = batch_.layer(layer).positions,
         .sealed = groups * context_.options.group_tokens,
         .group_tokens = context_.options.group_tokens,
         .step = context_.options.select_queries_max});
  }
  truncate_clusters(context_, batch_, layer, groups * context_.options.group_tokens);
  context_.store->truncate(layer, groups);
  context_.selector->summaries().truncate(layer, groups * context_.options.group_tokens);
  Batch::Layer& state = batch_.layer(layer);
  state.sealed_groups = groups;
  state.first_in_tail = std::min(state.first_in_tail, groups);
  account_.drain(batch_);
}

/// A run to fill. Those on their way from a device keep their buffers: one is left for this.
Result<RecordStore::StagedRun> Sealer::stage(int64_t layer, int64_t count) {
  if (static_cast<int64_t>(sent_.size()) == Plan::kWriteBuffers) {
    KVSWAP_RETURN_IF_ERROR(hand_over_oldest());
  }
  return context_.store->stage(layer, count);
}

/// The run is packed: its records are sealed, and go to the disk once they have come from there.
Status Sealer::commit(RecordStore::StagedRun run, std::span<const int64_t> sequences) {
  context_.store->enter(run, sequences);
  const StoreStaging::Sent sent =
      context_.space->outbox().send(run, run.count * context_.record_bytes());
  sent_.push_back(std::move(run));
  return sent == StoreStaging::Sent::kArrived ? hand_over_oldest() : Status::ok();
}

Status Sealer::hand_over_oldest() {
  RecordStore::StagedRun run = std::move(sent_.front());
  sent_.pop_front();
  const Status arrived = context_.space->outbox().arrive(run);
  const Status handed_over = context_.store->hand_over(run);
  return arrived.is_ok() ? handed_over : arrived;
}

Status Sealer::drain() {
  Status settled;
  while (!sent_.empty()) {
    Status handed_over = hand_over_oldest();
    if (settled.is_ok()) settled = std::move(handed_over);
  }
  return settled;
}

Status Sealer::drain_layer(int64_t layer) {
  for (const RecordStore::StagedRun& run : sent_) {
    if (run.layer == layer) return drain();
  }
  return Status::ok();
}

}  // namespace kvswap
