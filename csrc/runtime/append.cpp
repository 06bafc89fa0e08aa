#include <algorithm>
#include <cstring>
#include <numeric>

#include "runtime/engine.h"
#include "runtime/stopwatch.h"

namespace kvswap {

namespace {

const std::byte* offset_by(const void* base, int64_t elements, DType dtype) {
  return static_cast<const std::byte*>(base) + elements * dtype_bytes(dtype);
}

/// One sequence's tokens from `first_token` on, as the transfer kernel wants them.
TokenView view_of(const KeyValueView& tokens, int64_t sequence, int64_t first_token, DType dtype) {
  TokenView view;
  view.keys = const_cast<std::byte*>(
      offset_by(tokens.keys,
                sequence * tokens.key_batch_stride + first_token * tokens.key_token_stride, dtype));
  view.values = const_cast<std::byte*>(offset_by(
      tokens.values, sequence * tokens.value_batch_stride + first_token * tokens.value_token_stride,
      dtype));
  view.key_head_stride = tokens.key_head_stride;
  view.key_token_stride = tokens.key_token_stride;
  view.value_head_stride = tokens.value_head_stride;
  view.value_token_stride = tokens.value_token_stride;
  return view;
}

}  // namespace

Status Engine::append(int64_t layer, const KeyValueView& tokens) {
  KVSWAP_RETURN_IF_ERROR(check_layer(layer));
  const Stopwatch watch(counters_.append_seconds);
  if (tokens.tokens < 1) {
    return Status::invalid("append: tokens must be at least 1, got " +
                           std::to_string(tokens.tokens));
  }
  if (sequences_.empty()) KVSWAP_RETURN_IF_ERROR(begin(tokens.batch, tokens.tokens));
  if (tokens.batch != batch()) {
    return Status::invalid("append: batch must stay " + std::to_string(batch()) +
                           " for the life of the cache's contents, got " +
                           std::to_string(tokens.batch) + "; reset() the cache first");
  }
  const int64_t columns = layers_[layer].columns + tokens.tokens;
  if (options_.max_context > 0 && columns > options_.max_context) {
    return Status::budget("append: the context must stay within max_context (" +
                          std::to_string(options_.max_context) + " tokens), got " +
                          std::to_string(columns) + "; open the cache with a larger one");
  }
  const bool is_long = tokens.tokens > options_.select_queries_max;
  if (!is_long) {
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
  if (is_long) {
    const int64_t sealed = layers_[layer].sealed_groups;
    const Status appended = append_chunk(layer, tokens);
    if (!appended.is_ok()) take_back(layer, sealed);
    return appended;
  }
  fill_tail(layer, tokens, 0, tokens.tokens, layers_[layer].columns);
  layers_[layer].columns = columns;
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
  const int64_t scratch_bytes = std::max<int64_t>(
      0, batch() * options_.select_queries_max * groups * int64_t{sizeof(float)} - scored_bytes_);
  const int64_t table_bytes = batch() * (due - charged) * RecordStore::table_bytes_per_group();
  const std::string what = "a context of " + std::to_string(columns) + " tokens";
  const int64_t bytes = summary_bytes + table_bytes + scratch_bytes;
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
  std::vector<int64_t> first_tokens;
  std::vector<int32_t> slots;
  std::vector<int32_t> lengths;
  for (int64_t token = 0; token < count;) {
    const int64_t slot = (first_column + token) % group_tokens;
    const int64_t length = std::min(group_tokens - slot, count - token);
    first_tokens.push_back(token);
    slots.push_back(static_cast<int32_t>(slot));
    lengths.push_back(static_cast<int32_t>(length));
    token += length;
  }
  records.resize(first_tokens.size());
  for (int64_t sequence = 0; sequence < batch(); ++sequence) {
    SequencePages& pages = *sequences_[sequence];
    for (size_t i = 0; i < records.size(); ++i) {
      const int64_t group = (first_column + first_tokens[i]) / group_tokens;
      records[i] = pages.pool().page(pages.tail_page(layer, group));
    }
    pack_records({.shape = record_shape(),
                  .tokens = view_of(tokens, sequence, first_token, options_.dtype),
                  .records = records.data(),
                  .first_tokens = first_tokens.data(),
                  .slots = slots.data(),
                  .lengths = lengths.data(),
                  .count = static_cast<int64_t>(records.size())});
  }
}

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
  std::memcpy(pages.pool().page(page), record, options_.payload_bytes());
  sinks.push_back(static_cast<int32_t>(group));
}

Status Engine::seal_from_tail(int64_t layer) {
  Layer& state = layers_[layer];
  const int64_t group = state.sealed_groups;
  const int64_t run_max = store_->run_records_max();
  for (int64_t first = 0; first < batch(); first += run_max) {
    const int64_t count = std::min(run_max, batch() - first);
    auto staged = store_->stage(layer, count);
    if (!staged.is_ok()) return staged.status();
    std::vector<int64_t> of_run(count);
    std::iota(of_run.begin(), of_run.end(), first);
    for (int64_t i = 0; i < count; ++i) {
      SequencePages& pages = *sequences_[first + i];
      const std::byte* page = pages.pool().page(pages.tail_page(layer, group));
      std::memcpy(staged.value().data() + i * record_bytes(), page, options_.payload_bytes());
      if (is_sink(first + i, group)) pin_sink(layer, first + i, group, page);
      if (selector_->has_projection(layer)) {
        selector_->append(layer, first + i, key_view(page), options_.group_tokens);
      }
    }
    KVSWAP_RETURN_IF_ERROR(store_->commit(staged.value(), of_run));
  }
  counters_.records_sealed += batch();
  ++state.sealed_groups;
  return Status::ok();
}

Status Engine::seal_directly(int64_t layer, const KeyValueView& tokens, int64_t first_token,
                             int64_t groups) {
  Layer& state = layers_[layer];
  const int64_t run_max = store_->run_records_max();
  for (int64_t sequence = 0; sequence < batch(); ++sequence) {
    const TokenView view = view_of(tokens, sequence, first_token, options_.dtype);
    for (int64_t done = 0; done < groups; done += run_max) {
      const int64_t count = std::min(run_max, groups - done);
      auto staged = store_->stage(layer, count);
      if (!staged.is_ok()) return staged.status();
      pack_run(staged.value(), view, done);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t group = state.sealed_groups + done + i;
        if (is_sink(sequence, group)) {
          pin_sink(layer, sequence, group, staged.value().data() + i * record_bytes());
        }
      }
      KVSWAP_RETURN_IF_ERROR(store_->commit(staged.value(), std::vector<int64_t>(count, sequence)));
    }
    if (selector_->has_projection(layer)) {
      const KeyView keys = {view.keys, view.key_head_stride, view.key_token_stride, options_.dtype};
      selector_->append(layer, sequence, keys, groups * options_.group_tokens);
    }
  }
  counters_.records_sealed += batch() * groups;
  state.sealed_groups += groups;
  return Status::ok();
}

void Engine::pack_run(const RecordStore::StagedRun& run, const TokenView& view,
                      int64_t first_group) {
  std::vector<void*> records(run.count);
  std::vector<int64_t> first_tokens(run.count);
  for (int64_t i = 0; i < run.count; ++i) {
    records[i] = run.data() + i * record_bytes();
    first_tokens[i] = (first_group + i) * options_.group_tokens;
  }
  const auto pack = [&](int64_t begin, int64_t end) {
    pack_records({.shape = record_shape(),
                  .tokens = view,
                  .records = records.data() + begin,
                  .first_tokens = first_tokens.data() + begin,
                  .slots = nullptr,
                  .lengths = nullptr,
                  .count = end - begin});
  };
  parallel_ ? parallel_(run.count, 16, pack) : serial_for(run.count, 16, pack);
}

KeyView Engine::key_view(const std::byte* record) const {
  return {record, 2 * options_.group_tokens * options_.head_dim, options_.head_dim, options_.dtype};
}

}  // namespace kvswap
