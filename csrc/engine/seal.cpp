// Groups leave the tail, or a long chunk, for the disk.

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "io/stopwatch.h"

namespace kvswap {

bool Engine::is_sink(int64_t sequence, int64_t group) const {
  const int64_t first = validity_[sequence].first_valid();
  if (options_.sink_tokens == 0 || first >= validity_[sequence].columns()) return false;
  return group >= first / options_.group_tokens &&
         group <= (first + options_.sink_tokens - 1) / options_.group_tokens;
}

void Engine::pin_sink(int64_t layer, int64_t sequence, int64_t group, const std::byte* record) {
  SequencePages& pages = *sequences_[sequence];
  std::vector<int32_t>& sinks = pages.sinks(layer);
  const int32_t page = pages.sink_page(layer, static_cast<int64_t>(sinks.size()));
  space_->copy(pages.pool().page(page), record, options_.payload_bytes());
  sinks.push_back(static_cast<int32_t>(group));
}

Status Engine::seal_overflow(int64_t layer) {
  while (due_groups(layer, layers_[layer].columns) > 0) {
    const Status sealed = seal_from_tail(layer);
    if (!sealed.is_ok()) {
      // A part of the batch may be sealed: all of it or nothing.
      take_back(layer, layers_[layer].sealed_groups);
      return sealed;
    }
  }
  return Status::ok();
}

Status Engine::seal_from_tail(int64_t layer) {
  const Stopwatch watch(timeline_.get(), {.kind = SpanKind::kSeal, .layer = layer});
  Layer& state = layers_[layer];
  const int64_t group = state.sealed_groups;
  const int64_t run_max = store_->run_records_max();
  for (int64_t first = 0; first < batch(); first += run_max) {
    const int64_t count = std::min(run_max, batch() - first);
    auto staged = stage(layer, count);
    if (!staged.is_ok()) return staged.status();
    std::byte* outbox = space_->outbox(staged.value());
    std::vector<int64_t> of_run(count);
    std::iota(of_run.begin(), of_run.end(), first);
    Status summarised;
    for (int64_t i = 0; i < count; ++i) {
      SequencePages& pages = *sequences_[first + i];
      const std::byte* page = pages.pool().page(pages.tail_page(layer, group));
      space_->copy(outbox + i * record_bytes(), page, options_.payload_bytes());
      if (is_sink(first + i, group)) pin_sink(layer, first + i, group, page);
      if (selector_->has_projection(layer) && summarised.is_ok()) {
        summarised = selector_->append(layer, first + i, key_view(page), options_.group_tokens);
      }
    }
    KVSWAP_RETURN_IF_ERROR(commit(std::move(staged.value()), of_run));
    KVSWAP_RETURN_IF_ERROR(summarised);
  }
  counters_.records_sealed += batch();
  ++state.sealed_groups;
  return Status::ok();
}

Status Engine::seal_directly(int64_t layer, const KeyValueView& tokens, int64_t first_token,
                             int64_t groups) {
  const Stopwatch watch(timeline_.get(), {.kind = SpanKind::kSeal, .layer = layer});
  Layer& state = layers_[layer];
  const int64_t run_max = store_->run_records_max();
  for (int64_t sequence = 0; sequence < batch(); ++sequence) {
    for (int64_t done = 0; done < groups; done += run_max) {
      const int64_t count = std::min(run_max, groups - done);
      auto staged = stage(layer, count);
      if (!staged.is_ok()) return staged.status();
      pack_run(staged.value(), tokens, sequence, first_token + done * options_.group_tokens);
      const std::byte* outbox = space_->outbox(staged.value());
      for (int64_t i = 0; i < count; ++i) {
        const int64_t group = state.sealed_groups + done + i;
        if (is_sink(sequence, group)) {
          pin_sink(layer, sequence, group, outbox + i * record_bytes());
        }
      }
      KVSWAP_RETURN_IF_ERROR(
          commit(std::move(staged.value()), std::vector<int64_t>(count, sequence)));
    }
    if (selector_->has_projection(layer)) {
      const int64_t first_key =
          sequence * tokens.key_batch_stride + first_token * tokens.key_token_stride;
      const KeyView keys = {
          static_cast<const std::byte*>(tokens.keys) + first_key * dtype_bytes(options_.dtype),
          tokens.key_head_stride, tokens.key_token_stride, options_.dtype};
      KVSWAP_RETURN_IF_ERROR(
          selector_->append(layer, sequence, keys, groups * options_.group_tokens));
    }
  }
  counters_.records_sealed += batch() * groups;
  state.sealed_groups += groups;
  return Status::ok();
}

void Engine::pack_run(const RecordStore::StagedRun& run, const KeyValueView& tokens,
                      int64_t sequence, int64_t first_token) {
  std::vector<void*> records(run.count);
  std::vector<int64_t> first_tokens(run.count);
  const std::vector<int32_t> sequences(run.count, static_cast<int32_t>(sequence));
  std::byte* outbox = space_->outbox(run);
  for (int64_t i = 0; i < run.count; ++i) {
    records[i] = outbox + i * record_bytes();
    first_tokens[i] = first_token + i * options_.group_tokens;
  }
  cuda::BatchTransferArgs transfer = transfer_of(tokens);
  transfer.records = records.data();
  transfer.sequences = sequences.data();
  transfer.first_tokens = first_tokens.data();
  transfer.count = run.count;
  space_->pack(transfer);
}

KeyView Engine::key_view(const std::byte* record) const {
  return {record, 2 * options_.group_tokens * options_.head_dim, options_.head_dim, options_.dtype};
}

/// A run to fill. Those on their way from a device keep their buffers: one is left for this.
Result<RecordStore::StagedRun> Engine::stage(int64_t layer, int64_t count) {
  if (static_cast<int64_t>(sealing_.size()) == kWriteBuffers) {
    KVSWAP_RETURN_IF_ERROR(hand_over_oldest());
  }
  return store_->stage(layer, count);
}

/// The outbox is full: the records are sealed, and go to the disk once they have come from there.
Status Engine::commit(RecordStore::StagedRun run, std::span<const int64_t> sequences) {
  store_->enter(run, sequences);
  space_->send(run, run.count * record_bytes());
  sealing_.push_back(std::move(run));
  return space_->is_host() ? hand_over_oldest() : Status::ok();
}

Status Engine::hand_over_oldest() {
  const RecordStore::StagedRun run = std::move(sealing_.front());
  sealing_.pop_front();
  const Status arrived = space_->arrive(run);
  const Status handed_over = store_->hand_over(run);
  return arrived.is_ok() ? handed_over : arrived;
}

Status Engine::settle_seals() {
  Status settled;
  while (!sealing_.empty()) {
    Status handed_over = hand_over_oldest();
    if (settled.is_ok()) settled = std::move(handed_over);
  }
  return settled;
}

Status Engine::settle_seals_of(int64_t layer) {
  for (const RecordStore::StagedRun& run : sealing_) {
    if (run.layer == layer) return settle_seals();
  }
  return Status::ok();
}

}  // namespace kvswap
