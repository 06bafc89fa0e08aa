#include "engine/sequence_editor.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace kvswap {

void SequenceEditor::reserve(Arena& arena, const Plan& plan, const Extent& extent) {
  // A crop into sealed groups reads all layers before it changes one; see make_room().
  const int64_t layers = std::max<int64_t>(1, plan.options.layers - plan.crop_lenders);
  arena.take(Use::kScratch,
             size_product({layers, extent.batch, plan.tail_pages, plan.record_bytes}));
}

Status SequenceEditor::crop(int64_t positions) {
  if (positions < 0) {
    return Status::invalid("crop: positions must be at least 0, got " + std::to_string(positions));
  }
  KVSWAP_RETURN_IF_ERROR(steps_.drop_all());
  // All layers are read first: if the disk fails, nothing has changed, and crop() may be called
  // again.
  std::vector<Returning> all;
  for (int64_t layer = 0; layer < context_.options.layers; ++layer) {
    if (batch_.layer(layer).positions <= positions) continue;
    auto returning = read_returning(layer, positions);
    if (!returning.is_ok()) return returning.status();
    all.push_back(std::move(returning.value()));
  }
  for (const Returning& returning : all) KVSWAP_RETURN_IF_ERROR(crop_layer(returning, positions));
  batch_.change_validity([positions](int64_t, PaddingMask& validity) {
    if (validity.positions() > positions) validity.truncate(positions);
  });
  context_.selector->forget_scores();
  account_.drain(batch_);
  return Status::ok();
}

Result<SequenceEditor::Returning> SequenceEditor::read_returning(int64_t layer, int64_t positions) {
  const Batch::Layer& state = batch_.layer(layer);
  const int64_t group_tokens = context_.options.group_tokens;
  const int64_t sealed = std::min(state.sealed_groups, context_.options.sealed_groups(positions));
  const int64_t end = (positions + group_tokens - 1) / group_tokens;
  for (int64_t sequence = 0; positions > 0 && sequence < batch_.size(); ++sequence) {
    const int64_t gone = context_.store->tables().first_group(layer, sequence);
    // The tail begins at what is sealed.
    if (sealed < gone) {
      return dropped("crop", positions, gone * group_tokens + context_.options.tail_tokens);
    }
  }
  Returning returning;
  returning.layer = layer;
  returning.sealed = sealed;
  returning.groups = std::min(state.sealed_groups, end) - sealed;
  if (returning.groups <= 0) return returning;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    KVSWAP_RETURN_IF_ERROR(make_room(sequence, returning));
    KVSWAP_RETURN_IF_ERROR(past_.load({layer, sequence, sealed, returning.groups},
                                      returning.records.back(), returning.memory.back()));
  }
  return returning;
}

/// Where one more sequence's groups land: in pages of the layer's reuse buffer, whose own groups
/// are forgotten; in memory of their own where the pages are a device's or too few.
Status SequenceEditor::make_room(int64_t sequence, Returning& returning) {
  SequencePages& pages = batch_.pages(sequence);
  const bool lands_there =
      context_.space->landing().landing_in(pages.first_reuse_page(returning.layer)) != nullptr;
  std::byte* lent = lands_there ? pages.lend_to_crop(returning.layer, returning.groups) : nullptr;
  if (lent != nullptr) {
    returning.records.push_back(lent);
    returning.memory.push_back(pages.memory());
    return Status::ok();
  }
  auto memory = share_aligned_bytes(returning.groups * context_.record_bytes(),
                                    context_.options.memory_at_end());
  if (!memory.is_ok()) return memory.status();
  returning.records.push_back(memory.value().get());
  returning.memory.push_back(std::move(memory.value()));
  return Status::ok();
}

Status SequenceEditor::crop_layer(const Returning& returning, int64_t positions) {
  std::vector<std::byte> room(context_.plan.group_bytes);
  PrefixPages listed;
  for (int64_t sequence = 0; returning.groups > 0 && sequence < batch_.size(); ++sequence) {
    KVSWAP_RETURN_IF_ERROR(
        past_.list({returning.layer, sequence, returning.sealed, returning.groups},
                   returning.records[sequence], listed));
    for (int64_t i = 0; i < returning.groups; ++i) {
      KVSWAP_RETURN_IF_ERROR(tail_.put_back(returning.layer, sequence, returning.sealed + i,
                                            past_.tokens(listed, i, room.data())));
    }
  }
  Batch::Layer& layer = batch_.layer(returning.layer);
  layer.positions = positions;
  layer.prefilled = std::min(layer.prefilled, positions);
  steps_.of(returning.layer).forget_selection();
  sealer_.roll_back(returning.layer, returning.sealed);
  return Status::ok();
}

Status SequenceEditor::select_sequences(std::span<const int64_t> indices) {
  const int64_t apart = context_.options.heads_apart;
  for (const int64_t index : indices) {
    if (index < 0 || index >= batch_.size()) {
      return Status::invalid("select_sequences: indices must be 0.." +
                             std::to_string(batch_.size() / apart - 1) + ", got " +
                             std::to_string(index / apart));
    }
  }
  const auto count = static_cast<int64_t>(indices.size());
  if (count == 0) {
    return Status::invalid(
        "select_sequences: at least one sequence must stay, got no index; reset() empties the "
        "cache");
  }
  if (context_.options.max_batch > 0 && count > context_.options.max_batch) {
    return Status::invalid("select_sequences: the batch must be at most max_batch (" +
                           std::to_string(context_.options.max_batch / apart) + "), got " +
                           std::to_string(count / apart));
  }
  KVSWAP_RETURN_IF_ERROR(steps_.drop_all());
  for (int64_t layer = 0; layer < context_.options.layers; ++layer) {
    KVSWAP_RETURN_IF_ERROR(sealer_.seal_overflow(layer));
  }
  KVSWAP_RETURN_IF_ERROR(sealer_.drain());
  KVSWAP_RETURN_IF_ERROR(account_.reserve(count, 0));
  KVSWAP_RETURN_IF_ERROR(batch_.spares().grow(count - batch_.size()));
  KVSWAP_RETURN_IF_ERROR(account_.charge_batch(batch_, count));
  batch_.select(indices);
  steps_.forget_choices();
  context_.selector->forget_scores();
  account_.drain(batch_);
  return Status::ok();
}

Status SequenceEditor::set_projection(int64_t layer, int64_t rank, const float* keys,
                                      const float* queries) {
  if (context_.options.ranks.empty()) {
    return context_.selector->set_projection(layer, rank, keys, queries);  // refuses
  }
  if (context_.plan.is_exact(layer)) {
    return Status::invalid(
        "set_projection: layer " + std::to_string(layer) +
        " must choose to need one, and attends everything (selection.dense_layers)");
  }
  if (rank != context_.options.ranks[layer]) {
    return Status::invalid("set_projection: layer " + std::to_string(layer) + " must have rank " +
                           std::to_string(context_.options.ranks[layer]) + ", got " +
                           std::to_string(rank));
  }
  KVSWAP_RETURN_IF_ERROR(steps_.drop(layer));
  context_.selector->drop_projection(layer);
  account_.drain(batch_);
  Status summarised = account_.charge_projection(layer);
  if (summarised.is_ok()) {
    summarised = context_.selector->set_projection(layer, rank, keys, queries);
  }
  if (summarised.is_ok()) summarised = summarise(layer);
  if (!summarised.is_ok()) {
    // Half a summary must not choose: the layer is as if it never had a projection.
    context_.selector->drop_projection(layer);
    account_.drain(batch_);
  }
  return summarised;
}

/// Reads what is sealed, and gives it to the selector where that computes.
Status SequenceEditor::summarise(int64_t layer) {
  KVSWAP_RETURN_IF_ERROR(account_.charge_summary(batch_, layer));
  const int64_t sealed = batch_.layer(layer).sealed_groups;
  if (sealed == 0) return Status::ok();
  const int64_t record_bytes = context_.record_bytes();
  const int64_t block = std::min(context_.plan.past_block_groups, sealed);
  auto shared = share_aligned_bytes(block * record_bytes, context_.options.memory_at_end());
  if (!shared.is_ok()) return shared.status();
  const std::shared_ptr<std::byte>& buffer = shared.value();
  // Records go there as they were read, those of e4m3 decoded.
  const int64_t page_bytes =
      context_.plan.has_float8_records ? context_.plan.token_page_bytes : record_bytes;
  auto pool = context_.space->make_pool(block, page_bytes);
  if (!pool.is_ok()) return pool.status();
  const auto page = [&](int64_t i) { return pool.value().page(static_cast<int32_t>(i)); };
  std::vector<std::byte> room(context_.plan.group_bytes);
  PrefixPages listed;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    for (int64_t group = 0; group < sealed; group += block) {
      const PrefixReader::Groups groups = {layer, sequence, group, std::min(block, sealed - group)};
      KVSWAP_RETURN_IF_ERROR(past_.load(groups, buffer.get(), buffer));
      if (!context_.plan.has_float8_records) {
        KVSWAP_RETURN_IF_ERROR(
            context_.space->compute().upload(page(0), buffer.get(), groups.count * record_bytes));
      }
      KVSWAP_RETURN_IF_ERROR(past_.list(groups, buffer.get(), listed));
      for (int64_t i = 0; i < groups.count; ++i) {
        if (context_.plan.has_float8_records) {
          KVSWAP_RETURN_IF_ERROR(context_.space->compute().upload(
              page(i), past_.tokens(listed, i, room.data()), context_.plan.group_bytes));
        }
        KVSWAP_RETURN_IF_ERROR(context_.selector->append({.layer = layer,
                                                          .sequence = sequence,
                                                          .keys = sealer_.keys_of(page(i)),
                                                          .tokens = context_.options.group_tokens,
                                                          .valid = &batch_.validity(sequence)}));
      }
    }
  }
  return context_.space->compute().hand_back();
}

}  // namespace kvswap
