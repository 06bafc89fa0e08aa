#include <algorithm>
#include <vector>

#include "engine/engine.h"
#include "io/stopwatch.h"

namespace kvswap {

Status Engine::prepare(int64_t layer, int64_t batch, int64_t tokens) {
  KVSWAP_RETURN_IF_ERROR(check_layer(layer));
  settle_choice();
  prepared_ = -1;
  if (tokens < 1) {
    return Status::invalid("append: tokens must be at least 1, got " + std::to_string(tokens));
  }
  if (sequences_.empty()) KVSWAP_RETURN_IF_ERROR(begin(batch, tokens));
  if (batch != this->batch()) {
    return Status::invalid("append: batch must stay " + std::to_string(this->batch()) +
                           " for the life of the cache's contents, got " + std::to_string(batch) +
                           "; reset() the cache first");
  }
  const int64_t columns = layers_[layer].columns + tokens;
  if (options_.max_context > 0 && columns > options_.max_context) {
    return Status::budget("append: the context must stay within max_context (" +
                          std::to_string(options_.max_context) + " tokens), got " +
                          std::to_string(columns) + "; open the cache with a larger one");
  }
  if (tokens <= options_.select_queries_max) {
    // Left over when nobody attended after the last append().
    const int64_t sealed = layers_[layer].sealed_groups;
    KVSWAP_RETURN_IF_ERROR(seal_overflow(layer));
    if (layers_[layer].sealed_groups != sealed) drop_step(layer);
  } else {
    drop_step(layer);
  }
  KVSWAP_RETURN_IF_ERROR(charge_growth(layer, columns));
  for (TokenValidity& validity : validity_) {
    if (validity.columns() < columns) validity.append(columns - validity.columns(), nullptr);
  }
  space_->mark_tokens();
  prepared_ = layer;
  return Status::ok();
}

Status Engine::append(int64_t layer, const KeyValueView& tokens) {
  const Stopwatch watch(timeline_.get(), {.kind = SpanKind::kAppend, .layer = layer},
                        &counters_.append_seconds);
  const bool is_prepared =
      prepared_ == layer && tokens.batch == batch() && tokens.tokens > options_.select_queries_max;
  if (!is_prepared) KVSWAP_RETURN_IF_ERROR(prepare(layer, tokens.batch, tokens.tokens));
  prepared_ = -1;
  return handed_back(append_prepared(layer, tokens));
}

Status Engine::append_prepared(int64_t layer, const KeyValueView& tokens) {
  if (tokens.tokens > options_.select_queries_max) {
    const int64_t sealed = layers_[layer].sealed_groups;
    space_->begin_chunk();
    const Status appended = append_chunk(layer, tokens);
    space_->end_chunk();
    if (!appended.is_ok()) take_back(layer, sealed);
    return appended;
  }
  fill_tail(layer, tokens, 0, tokens.tokens, layers_[layer].columns);
  layers_[layer].columns += tokens.tokens;
  return Status::ok();
}

/// Groups that stand in the tail and will leave it, once the layer has `columns`.
int64_t Engine::due_groups(int64_t layer, int64_t columns) const {
  return std::max<int64_t>(0, options_.sealed_groups(columns) - layers_[layer].sealed_groups);
}

Status Engine::charge_growth(int64_t layer, int64_t columns) {
  const int64_t group_tokens = options_.group_tokens;
  const int64_t charged = due_groups(layer, layers_[layer].columns);
  const int64_t due = due_groups(layer, columns);
  if (due == charged) return Status::ok();
  const int64_t summary_bytes = selector_->bytes_to_append(layer, due * group_tokens) -
                                selector_->bytes_to_append(layer, charged * group_tokens);
  const int64_t groups = layers_[layer].sealed_groups + due;
  const int64_t scratch_bytes =
      std::max<int64_t>(0, options_.score_bytes(batch(), groups) - scored_bytes_);
  const int64_t table_bytes = batch() * (due - charged) * RecordStore::table_bytes_per_group();
  const std::string what = "a context of " + std::to_string(columns) + " tokens";
  const int64_t bytes = summary_bytes + table_bytes + scratch_bytes;
  if (!reserve_space(batch(), groups).is_ok()) release_spare(0);
  KVSWAP_RETURN_IF_ERROR(reserve_space(batch(), groups));
  if (!ledger_.check(bytes, what).is_ok()) release_spare(0);
  KVSWAP_RETURN_IF_ERROR(ledger_.check(bytes, what));
  KVSWAP_RETURN_IF_ERROR(ledger_.charge(Use::kSummary, summary_bytes, what));
  KVSWAP_RETURN_IF_ERROR(ledger_.charge(Use::kTables, table_bytes, what));
  KVSWAP_RETURN_IF_ERROR(ledger_.charge(Use::kScratch, scratch_bytes, what));
  scored_bytes_ += scratch_bytes;
  return Status::ok();
}

/// Forgets what was sealed from group `groups` on: what is kept of it stands in the tail again.
void Engine::take_back(int64_t layer, int64_t groups) {
  // An error is kept by the writer, and told by the next call that writes.
  (void)settle_seals().is_ok();
  for (auto& sequence : sequences_) {
    std::erase_if(sequence->sinks(layer), [&](int32_t group) { return group >= groups; });
  }
  store_->truncate(layer, groups);
  selector_->truncate(layer, groups * options_.group_tokens);
  layers_[layer].sealed_groups = groups;
  settle_charges();
}

Status Engine::append_chunk(int64_t layer, const KeyValueView& tokens) {
  Layer& state = layers_[layer];
  const int64_t group_tokens = options_.group_tokens;
  const int64_t columns = state.columns + tokens.tokens;
  const int64_t groups_after = options_.sealed_groups(columns);

  // Complete the tail's last group, so that the rest of the chunk begins at a group's edge.
  const int64_t to_edge = (group_tokens - state.columns % group_tokens) % group_tokens;
  int64_t done = std::min(to_edge, tokens.tokens);
  fill_tail(layer, tokens, 0, done, state.columns);
  const int64_t first_direct = (state.columns + done) / group_tokens;
  while (state.sealed_groups < std::min(groups_after, first_direct)) {
    KVSWAP_RETURN_IF_ERROR(seal_from_tail(layer));
  }
  if (groups_after > first_direct) {
    const int64_t groups = groups_after - first_direct;
    KVSWAP_RETURN_IF_ERROR(seal_directly(layer, tokens, done, groups));
    done += groups * group_tokens;
  }
  fill_tail(layer, tokens, done, tokens.tokens - done, state.columns + done);
  state.columns = columns;
  return Status::ok();
}

void Engine::fill_tail(int64_t layer, const KeyValueView& tokens, int64_t first_token,
                       int64_t count, int64_t first_column) {
  if (count == 0) return;
  const int64_t group_tokens = options_.group_tokens;
  std::vector<void*> records;
  std::vector<int32_t> sequences;
  std::vector<int64_t> first_tokens;
  std::vector<int32_t> slots;
  std::vector<int32_t> lengths;
  for (int64_t sequence = 0; sequence < batch(); ++sequence) {
    const SequencePages& pages = *sequences_[sequence];
    for (int64_t token = 0; token < count;) {
      const int64_t column = first_column + token;
      const int64_t length = std::min(group_tokens - column % group_tokens, count - token);
      records.push_back(pages.pool().page(pages.tail_page(layer, column / group_tokens)));
      sequences.push_back(static_cast<int32_t>(sequence));
      first_tokens.push_back(first_token + token);
      slots.push_back(static_cast<int32_t>(column % group_tokens));
      lengths.push_back(static_cast<int32_t>(length));
      token += length;
    }
  }
  cuda::BatchTransferArgs transfer = transfer_of(tokens);
  transfer.records = records.data();
  transfer.sequences = sequences.data();
  transfer.first_tokens = first_tokens.data();
  transfer.slots = slots.data();
  transfer.lengths = lengths.data();
  transfer.count = static_cast<int64_t>(records.size());
  space_->pack(transfer);
}

/// All sequences' tokens; which of them go where is left to fill in.
cuda::BatchTransferArgs Engine::transfer_of(const KeyValueView& tokens) const {
  cuda::BatchTransferArgs transfer;
  transfer.shape = options_.record_shape();
  transfer.tokens = {.keys = const_cast<void*>(tokens.keys),
                     .values = const_cast<void*>(tokens.values),
                     .key_head_stride = tokens.key_head_stride,
                     .key_token_stride = tokens.key_token_stride,
                     .value_head_stride = tokens.value_head_stride,
                     .value_token_stride = tokens.value_token_stride};
  transfer.key_batch_stride = tokens.key_batch_stride;
  transfer.value_batch_stride = tokens.value_batch_stride;
  return transfer;
}

}  // namespace kvswap
