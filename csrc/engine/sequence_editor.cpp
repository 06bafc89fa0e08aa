#include "engine/sequence_editor.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace kvswap {

namespace {

/// Groups that summarise() uploads at once: a device waits for each upload.
int64_t summarised_at_once(const Plan& plan) { return plan.options.device ? 8 : 1; }

}  // namespace

void SequenceEditor::reserve(Arena& arena, const Plan& plan) {
  // The pages that summarise() fills, and what it gathers for them; records are read to
  // PrefixReader::blocks().
  if (!plan.rows.takes_projections) return;
  arena.take(Use::kStaging, summarised_at_once(plan) * (plan.token_page_bytes + plan.group_bytes));
}

Status SequenceEditor::crop(int64_t positions) {
  if (positions < 0) {
    return Status::invalid("crop: positions must be at least 0, got " + std::to_string(positions));
  }
  const std::optional<UnfinishedCrop>& unfinished = context_.unfinished_crop;
  if (unfinished && positions > unfinished->positions) {
    return Status::invalid("crop: positions must be at most " +
                           std::to_string(unfinished->positions) +
                           ", where a crop was stopped half-way, got " + std::to_string(positions));
  }
  KVSWAP_RETURN_IF_ERROR(steps_.drop_all());
  std::vector<Returning> all;
  // Layer 0 is the last: its positions are the session's until the crop is done.
  for (int64_t layer = context_.options.layers - 1; layer >= 0; --layer) {
    if (batch_.layer(layer).positions <= positions) continue;
    auto returning = returning_of(layer, positions);
    if (!returning.is_ok()) return returning.status();
    all.push_back(returning.value());
  }
  // There is no memory for the tails of all layers: what returns is read twice. Where the first
  // reading fails nothing has changed.
  for (const Returning& returning : all) {
    KVSWAP_RETURN_IF_ERROR(read(returning, [](const Read&) { return Status::ok(); }));
  }
  for (const Returning& returning : all) {
    Status cropped = crop_layer(returning, positions);
    if (!cropped.is_ok()) {
      context_.unfinished_crop = {positions, cropped};
      return cropped;
    }
  }
  context_.unfinished_crop.reset();
  batch_.change_validity([positions](int64_t, PaddingMask& validity) {
    if (validity.positions() > positions) validity.truncate(positions);
  });
  context_.selector->forget_scores();
  account_.drain(batch_);
  return Status::ok();
}

Status SequenceEditor::read_all() {
  KVSWAP_RETURN_IF_ERROR(steps_.drop_all());
  for (int64_t layer = 0; layer < context_.options.layers; ++layer) {
    if (context_.plan.is_exact(layer)) continue;
    KVSWAP_RETURN_IF_ERROR(read({.layer = layer, .groups = batch_.layer(layer).sealed_groups},
                                [](const Read&) { return Status::ok(); }));
  }
  return Status::ok();
}

Result<SequenceEditor::Returning> SequenceEditor::returning_of(int64_t layer,
                                                               int64_t positions) const {
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
  return Returning{.layer = layer,
                   .sealed = sealed,
                   .groups = std::max<int64_t>(0, std::min(state.sealed_groups, end) - sealed)};
}

template <typename Visit>
Status SequenceEditor::read(const Returning& returning, const Visit& visit) {
  if (returning.groups == 0) return Status::ok();
  auto blocks = past_.blocks();
  if (!blocks.is_ok()) return blocks.status();
  std::byte* records = blocks.value().slots[0];
  const int64_t block = 2 * blocks.value().groups;
  PrefixPages listed;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    for (int64_t done = 0; done < returning.groups; done += block) {
      const PrefixReader::Groups groups = {returning.layer, sequence, returning.sealed + done,
                                           std::min(block, returning.groups - done)};
      KVSWAP_RETURN_IF_ERROR(past_.load(groups, records, blocks.value().memory));
      KVSWAP_RETURN_IF_ERROR(past_.list(groups, records, listed));
      KVSWAP_RETURN_IF_ERROR(visit(Read{groups, listed}));
    }
  }
  return Status::ok();
}

Status SequenceEditor::crop_layer(const Returning& returning, int64_t positions) {
  std::vector<std::byte> room(context_.plan.group_bytes);
  KVSWAP_RETURN_IF_ERROR(read(returning, [&](const Read& read) {
    const auto& [groups, listed] = read;
    for (int64_t i = 0; i < groups.count; ++i) {
      KVSWAP_RETURN_IF_ERROR(context_.space->compute().upload(
          batch_.pages(groups.sequence).tail_page(groups.layer, groups.first + i),
          past_.tokens(listed, i, room.data()), context_.plan.group_bytes));
    }
    return Status::ok();
  }));
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
  const int64_t at_once = summarised_at_once(context_.plan);
  auto pool = context_.space->make_pool(at_once, context_.plan.token_page_bytes);
  if (!pool.is_ok()) return pool.status();
  std::vector<std::byte*> pages(at_once);
  for (int64_t i = 0; i < at_once; ++i) pages[i] = pool.value().page(static_cast<int32_t>(i));
  std::vector<std::byte> gathered(at_once * context_.plan.group_bytes);
  KVSWAP_RETURN_IF_ERROR(read({.layer = layer, .groups = sealed}, [&](const Read& read) {
    for (int64_t first = 0; first < read.groups.count; first += at_once) {
      const int64_t count = std::min(at_once, read.groups.count - first);
      gather(read, first, count, gathered.data());
      KVSWAP_RETURN_IF_ERROR(context_.space->compute().upload_pages(
          std::span(pages).first(count), gathered.data(), context_.plan.group_bytes));
      for (int64_t i = 0; i < count; ++i) {
        KVSWAP_RETURN_IF_ERROR(
            context_.selector->append({.layer = layer,
                                       .sequence = read.groups.sequence,
                                       .keys = sealer_.keys_of(pages[i]),
                                       .tokens = context_.options.group_tokens,
                                       .valid = &batch_.validity(read.groups.sequence)}));
      }
    }
    return Status::ok();
  }));
  return context_.space->compute().hand_back();
}

/// Tokens of groups, in the model's dtype, one after the other.
void SequenceEditor::gather(const Read& read, int64_t first, int64_t count,
                            std::byte* target) const {
  for (int64_t i = 0; i < count; ++i, target += context_.plan.group_bytes) {
    const std::byte* tokens = past_.tokens(read.listed, first + i, target);
    if (tokens != target) std::memcpy(target, tokens, context_.plan.group_bytes);
  }
}

}  // namespace kvswap
