#include <algorithm>
#include <optional>
#include <utility>

#include "engine/engine.h"

namespace kvswap {

Status Engine::start_groups(int64_t layer, int64_t sequence, int64_t first_group, int64_t count,
                            std::byte* target, Fetch& fetch) {
  KVSWAP_RETURN_IF_ERROR(settle_seals_of(layer));
  fetch.layer = layer;
  fetch.loads.clear();
  for (int64_t i = 0; i < count; ++i) {
    fetch.loads.push_back({sequence, first_group + i, -1, target + i * record_bytes(), nullptr});
  }
  return fetcher_->submit(fetch);
}

Result<std::shared_ptr<std::byte>> Engine::past_blocks() {
  KVSWAP_ASSERT(past_blocks_ == nullptr || past_blocks_.use_count() == 1);
  if (past_blocks_ == nullptr) {
    auto memory =
        space_->make_landing(2 * options_.past_block_groups(record_bytes()) * record_bytes());
    if (!memory.is_ok()) return memory.status();
    past_blocks_ = std::move(memory.value());
  }
  return past_blocks_;
}

Status Engine::load_groups(int64_t layer, int64_t sequence, int64_t first_group, int64_t count,
                           std::byte* target) {
  Fetch fetch;
  KVSWAP_RETURN_IF_ERROR(start_groups(layer, sequence, first_group, count, target, fetch));
  return fetcher_->finish(fetch);
}

Status Engine::read_back(int64_t layer, int64_t sequence, int64_t begin, int64_t end, void* keys,
                         void* values) {
  KVSWAP_RETURN_IF_ERROR(check_layer(layer));
  settle_choice();
  const Layer& state = layers_[layer];
  if (sequence < 0 || sequence >= batch() || begin < 0 || begin > end || end > state.columns) {
    return Status::invalid("read_back: columns must lie in 0.." + std::to_string(state.columns) +
                           " of one of " + std::to_string(batch()) + " sequences, got " +
                           std::to_string(begin) + ".." + std::to_string(end) + " of sequence " +
                           std::to_string(sequence));
  }
  if (begin == end) return Status::ok();
  const int64_t group_tokens = options_.group_tokens;
  TokenView view = {.keys = keys,
                    .values = values,
                    .key_head_stride = (end - begin) * options_.head_dim,
                    .key_token_stride = options_.head_dim,
                    .value_head_stride = (end - begin) * options_.head_dim,
                    .value_token_stride = options_.head_dim};
  const auto unpack = [&](const std::byte* record, int64_t group) {
    const int64_t first = std::max(begin, group * group_tokens);
    const int64_t last = std::min(end, (group + 1) * group_tokens);
    void* base = const_cast<std::byte*>(record);
    const int64_t first_token = first - begin;
    const auto slot = static_cast<int32_t>(first - group * group_tokens);
    const auto length = static_cast<int32_t>(last - first);
    unpack_records({.shape = options_.record_shape(),
                    .tokens = view,
                    .records = &base,
                    .first_tokens = &first_token,
                    .slots = &slot,
                    .lengths = &length,
                    .count = 1});
  };
  const int64_t last_group = (end + group_tokens - 1) / group_tokens;
  const int64_t sealed_end = std::min(last_group, state.sealed_groups);
  int64_t group = begin / group_tokens;
  if (group < sealed_end) {
    const int64_t block = std::min(options_.past_block_groups(record_bytes()), sealed_end - group);
    auto buffer = AlignedBytes::allocate(block * record_bytes());
    if (!buffer.is_ok()) return buffer.status();
    for (; group < sealed_end; group += block) {
      const int64_t count = std::min(block, sealed_end - group);
      KVSWAP_RETURN_IF_ERROR(load_groups(layer, sequence, group, count, buffer.value().data()));
      for (int64_t i = 0; i < count; ++i) {
        unpack(buffer.value().data() + i * record_bytes(), group + i);
      }
    }
  }
  SequencePages& pages = *sequences_[sequence];
  std::vector<std::byte> record(options_.payload_bytes());
  for (group = std::max(begin / group_tokens, state.sealed_groups); group < last_group; ++group) {
    KVSWAP_RETURN_IF_ERROR(space_->download(
        record.data(), pages.pool().page(pages.tail_page(layer, group)), options_.payload_bytes()));
    unpack(record.data(), group);
  }
  return Status::ok();
}

Status Engine::set_projection(int64_t layer, int64_t rank, const float* keys,
                              const float* queries) {
  KVSWAP_RETURN_IF_ERROR(check_layer(layer));
  if (rank != options_.ranks[layer]) {
    return Status::invalid("set_projection: layer " + std::to_string(layer) + " must have rank " +
                           std::to_string(options_.ranks[layer]) + ", got " + std::to_string(rank));
  }
  settle_choice();
  drop_step(layer);
  prepared_ = -1;
  selector_->drop_projection(layer);
  settle_charges();
  const Status summarised = summarise(layer, rank, keys, queries);
  if (!summarised.is_ok()) {
    // Half a summary must not choose: the layer is as if it never had a projection.
    selector_->drop_projection(layer);
    settle_charges();
  }
  return summarised;
}

Status Engine::summarise(int64_t layer, int64_t rank, const float* keys, const float* queries) {
  const Layer& state = layers_[layer];
  const int64_t sealed = state.sealed_groups;
  const int64_t bytes = 2 * options_.kv_heads * options_.head_dim * rank * int64_t{sizeof(float)};
  KVSWAP_RETURN_IF_ERROR(ledger_.charge(Use::kProjections, bytes, "one more projection"));
  KVSWAP_RETURN_IF_ERROR(selector_->set_projection(layer, rank, keys, queries));
  const int64_t groups = sealed + due_groups(layer, state.columns);
  KVSWAP_RETURN_IF_ERROR(ledger_.charge(
      Use::kSummary, selector_->bytes_to_append(layer, groups * options_.group_tokens),
      "the summary of what is sealed"));
  if (sealed == 0) return Status::ok();

  const int64_t block = std::min(options_.past_block_groups(record_bytes()), sealed);
  auto buffer = AlignedBytes::allocate(block * record_bytes());
  if (!buffer.is_ok()) return buffer.status();
  std::byte* records = buffer.value().data();
  std::optional<PagePool> moved;  // where the selector sees them
  if (!space_->is_host()) {
    auto pool = space_->make_pool(block, record_bytes());
    if (!pool.is_ok()) return pool.status();
    moved = std::move(pool.value());
    records = moved->page(0);
  }
  for (int64_t sequence = 0; sequence < batch(); ++sequence) {
    for (int64_t group = 0; group < sealed; group += block) {
      const int64_t count = std::min(block, sealed - group);
      KVSWAP_RETURN_IF_ERROR(load_groups(layer, sequence, group, count, buffer.value().data()));
      if (moved) {
        KVSWAP_RETURN_IF_ERROR(
            space_->upload(records, buffer.value().data(), count * record_bytes()));
      }
      for (int64_t i = 0; i < count; ++i) {
        KVSWAP_RETURN_IF_ERROR(selector_->append(
            layer, sequence, key_view(records + i * record_bytes()), options_.group_tokens));
      }
    }
  }
  return space_->hand_back();
}

Status Engine::crop(int64_t columns) {
  KVSWAP_RETURN_IF_ERROR(check_process());
  if (columns < 0) {
    return Status::invalid("crop: columns must be at least 0, got " + std::to_string(columns));
  }
  settle_choice();
  drop_steps();
  prepared_ = -1;
  for (int64_t layer = 0; layer < options_.layers; ++layer) {
    if (layers_[layer].columns > columns) KVSWAP_RETURN_IF_ERROR(crop_layer(layer, columns));
  }
  for (TokenValidity& validity : validity_) {
    if (validity.columns() > columns) validity.truncate(columns);
  }
  settle_charges();
  return Status::ok();
}

Status Engine::crop_layer(int64_t layer, int64_t columns) {
  Layer& state = layers_[layer];
  const int64_t group_tokens = options_.group_tokens;
  const int64_t sealed = std::min(state.sealed_groups, options_.sealed_groups(columns));
  const int64_t groups = (columns + group_tokens - 1) / group_tokens;
  const int64_t returning = std::min(state.sealed_groups, groups) - sealed;
  if (returning > 0) {
    // Read everything first: if the disk fails, nothing has changed.
    auto buffer = AlignedBytes::allocate(batch() * returning * record_bytes());
    if (!buffer.is_ok()) return buffer.status();
    const auto record_at = [&](int64_t sequence, int64_t i) {
      return buffer.value().data() + (sequence * returning + i) * record_bytes();
    };
    for (int64_t sequence = 0; sequence < batch(); ++sequence) {
      KVSWAP_RETURN_IF_ERROR(
          load_groups(layer, sequence, sealed, returning, record_at(sequence, 0)));
    }
    for (int64_t sequence = 0; sequence < batch(); ++sequence) {
      SequencePages& pages = *sequences_[sequence];
      for (int64_t i = 0; i < returning; ++i) {
        KVSWAP_RETURN_IF_ERROR(space_->upload(pages.pool().page(pages.tail_page(layer, sealed + i)),
                                              record_at(sequence, i), options_.payload_bytes()));
      }
    }
  }
  state.columns = columns;
  state.step.chosen.clear();
  state.step.overriding.clear();
  take_back(layer, sealed);
  return Status::ok();
}

Status Engine::select_sequences(std::span<const int64_t> indices) {
  KVSWAP_RETURN_IF_ERROR(check_process());
  for (const int64_t index : indices) {
    if (index < 0 || index >= batch()) {
      return Status::invalid("select_sequences: indices must be 0.." + std::to_string(batch() - 1) +
                             ", got " + std::to_string(index));
    }
  }
  if (options_.max_batch > 0 && static_cast<int64_t>(indices.size()) > options_.max_batch) {
    return Status::invalid("select_sequences: the batch must be at most max_batch (" +
                           std::to_string(options_.max_batch) + "), got " +
                           std::to_string(indices.size()));
  }
  settle_choice();
  drop_steps();
  prepared_ = -1;
  for (int64_t layer = 0; layer < options_.layers; ++layer) {
    KVSWAP_RETURN_IF_ERROR(seal_overflow(layer));
  }
  KVSWAP_RETURN_IF_ERROR(settle_seals());
  const auto count = static_cast<int64_t>(indices.size());
  KVSWAP_RETURN_IF_ERROR(reserve_space(count, 0));
  KVSWAP_RETURN_IF_ERROR(grow_spare(count - batch()));
  KVSWAP_RETURN_IF_ERROR(charge_batch(count));
  std::vector<bool> is_used(sequences_.size(), false);
  for (const int64_t index : indices) is_used[index] = true;
  for (size_t i = 0; i < sequences_.size(); ++i) {
    if (is_used[i]) continue;
    sequences_[i]->clear();
    spare_.push_back(std::move(sequences_[i]));
  }

  // The first new sequence that continues an old one takes its memory, further ones copy it.
  std::vector<std::unique_ptr<SequencePages>> selected(indices.size());
  std::vector<SequencePages*> sources(sequences_.size(), nullptr);
  std::vector<TokenValidity> validity;
  for (size_t i = 0; i < indices.size(); ++i) {
    const int64_t index = indices[i];
    validity.push_back(validity_[index]);
    if (sources[index] == nullptr) {
      sources[index] = sequences_[index].get();
      selected[i] = std::move(sequences_[index]);
    } else {
      selected[i] = std::move(spare_.back());
      spare_.pop_back();
      selected[i]->copy_from(*sources[index], record_bytes());
    }
  }
  sequences_ = std::move(selected);
  validity_ = std::move(validity);
  store_->select_sequences(indices);
  selector_->select_sequences(indices);
  for (Layer& layer : layers_) {
    layer.step.chosen.clear();
    layer.step.overriding.clear();
  }
  settle_charges();
  return Status::ok();
}

/// Tables and scores of what is sealed, for a batch that grows.
Status Engine::charge_batch(int64_t batch) {
  int64_t groups = 0;
  int64_t groups_max = 0;
  for (const Layer& layer : layers_) {
    groups += layer.sealed_groups;
    groups_max = std::max(groups_max, layer.sealed_groups);
  }
  const int64_t table_bytes =
      std::max<int64_t>(0, batch - this->batch()) * groups * RecordStore::table_bytes_per_group();
  const int64_t scratch_bytes =
      std::max<int64_t>(0, options_.score_bytes(batch, groups_max) - scored_bytes_);
  const std::string what = "the tables of a batch of " + std::to_string(batch);
  KVSWAP_RETURN_IF_ERROR(ledger_.check(table_bytes + scratch_bytes, what));
  KVSWAP_RETURN_IF_ERROR(ledger_.charge(Use::kTables, table_bytes, what));
  KVSWAP_RETURN_IF_ERROR(ledger_.charge(Use::kScratch, scratch_bytes, what));
  scored_bytes_ += scratch_bytes;
  return Status::ok();
}

/// Releases what was charged beyond what is held and what the tail will still seal.
void Engine::settle_charges() {
  const int64_t sequences = batch() + static_cast<int64_t>(spare_.size());
  int64_t summary = selector_->resident_bytes();
  int64_t tables = memory_need(options_, record_bytes(), sequences, 0).tables;
  for (int64_t layer = 0; layer < options_.layers; ++layer) {
    const int64_t due = due_groups(layer, layers_[layer].columns);
    summary += selector_->bytes_to_append(layer, due * options_.group_tokens);
    tables += batch() * (layers_[layer].sealed_groups + due) * RecordStore::table_bytes_per_group();
  }
  const auto lower = [this](Use use, int64_t bytes) {
    if (ledger_.used(use) > bytes) ledger_.release(use, ledger_.used(use) - bytes);
  };
  lower(Use::kSummary, summary);
  lower(Use::kTables, tables);
  lower(Use::kProjections, selector_->projection_bytes());
}

}  // namespace kvswap
