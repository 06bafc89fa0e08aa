#include "engine/prefill/prefix_reader.h"

#include <algorithm>
#include <string>
#include <vector>

namespace kvswap {

Status dropped(const char* where, int64_t positions, int64_t gone) {
  return {StatusCode::kDropped,
          std::string(where) + ": positions must be at least " + std::to_string(gone) +
              ", since tokens before were dropped for good, got " + std::to_string(positions) +
              "; open the cache with a path, or reset() it"};
}

Status PrefixReader::start(const Groups& groups, std::byte* target, Fetch& fetch) {
  KVSWAP_RETURN_IF_ERROR(sealer_.drain_layer(groups.layer));
  fetch.layer = groups.layer;
  fetch.loads.clear();
  for (int64_t i = 0; i < groups.count; ++i) {
    fetch.loads.push_back({.sequence = groups.sequence,
                           .group = groups.first + i,
                           .target = target + i * context_.record_bytes()});
  }
  return context_.fetcher->submit(fetch);
}

Status PrefixReader::load(const Groups& groups, std::byte* target,
                          const std::shared_ptr<void>& memory) {
  Fetch fetch;
  KVSWAP_RETURN_IF_ERROR(start(groups, target, fetch));
  return load(fetch, memory);
}

Status PrefixReader::load_stored(const Records& records, std::byte* target,
                                 const std::shared_ptr<void>& memory) {
  KVSWAP_RETURN_IF_ERROR(sealer_.drain_layer(records.layer));
  Fetch fetch;
  fetch.layer = records.layer;
  fetch.stays_packed = true;
  for (const int64_t id : records.ids) {
    fetch.loads.push_back({.sequence = records.sequence, .group = id, .target = target});
    target += context_.stored_bytes();
  }
  KVSWAP_RETURN_IF_ERROR(context_.fetcher->submit(fetch));
  return load(fetch, memory);
}

Status PrefixReader::load(Fetch& fetch, const std::shared_ptr<void>& memory) {
  Status finished = finish(fetch);
  if (finished.is_pending()) abandon(fetch, memory);
  return finished;
}

Status PrefixReader::list(const Groups& groups, const std::byte* records, PrefixPages& listed) {
  const int64_t note_bytes = context_.plan.note_bytes;
  listed.pages.resize(groups.count);
  listed.exponents.resize(groups.count * note_bytes);
  for (int64_t i = 0; i < groups.count; ++i) {
    listed.pages[i] = records + i * context_.record_bytes();
    context_.store->copy_note(groups.layer, groups.sequence, groups.first + i,
                              listed.exponents.data() + i * note_bytes);
  }
  if (!context_.plan.has_rounded_records) return Status::ok();
  SequencePages& pages = batch_.pages(groups.sequence);
  const std::vector<int32_t>& sinks = pages.sinks(groups.layer);
  listed.sinks.resize(sinks.size() * context_.plan.group_bytes);
  for (size_t sink = 0; sink < sinks.size(); ++sink) {
    const int64_t i = sinks[sink] - groups.first;
    if (i < 0 || i >= groups.count) continue;
    std::byte* copy = listed.sinks.data() + sink * context_.plan.group_bytes;
    KVSWAP_RETURN_IF_ERROR(context_.space->compute().download(
        copy, pages.sink_page(groups.layer, static_cast<int64_t>(sink)),
        context_.plan.group_bytes));
    listed.pages[i] = copy;
    std::fill_n(listed.exponents.begin() + i * note_bytes, note_bytes, kNotFloat8);
  }
  return Status::ok();
}

const std::byte* PrefixReader::tokens(const PrefixPages& listed, int64_t index,
                                      std::byte* room) const {
  return tokens_of_page(context_.plan, listed.pages[index],
                        listed.exponents.data() + index * context_.plan.note_bytes, room);
}

Result<PrefixBlocks> PrefixReader::blocks() {
  // What was abandoned still lands in the old ones.
  if (blocks_ != nullptr && blocks_.use_count() > 1) {
    KVSWAP_RETURN_IF_ERROR(context_.fetcher->drain_abandoned());
  }
  KVSWAP_ASSERT(blocks_ == nullptr || blocks_.use_count() == 1);
  const int64_t record_bytes = context_.record_bytes();
  const int64_t groups = context_.plan.past_block_groups;
  if (blocks_ == nullptr) {
    auto memory = context_.space->landing().make_landing(2 * groups * record_bytes);
    if (!memory.is_ok()) return memory.status();
    blocks_ = std::move(memory.value());
  }
  return PrefixBlocks{.memory = blocks_,
                      .slots = {blocks_.get(), blocks_.get() + groups * record_bytes},
                      .groups = groups};
}

Status PrefixReader::read(const Positions& positions, void* keys, void* values) {
  const int64_t held = batch_.layer(positions.layer).positions;
  const int64_t apart = context_.options.heads_apart;
  if (positions.sequence < 0 || positions.sequence >= batch_.size() || positions.begin < 0 ||
      positions.begin > positions.end || positions.end > held) {
    return Status::invalid("read_back: positions must lie in 0.." + std::to_string(held) +
                           " of one of " + std::to_string(batch_.size() / apart) +
                           " sequences, got " + std::to_string(positions.begin) + ".." +
                           std::to_string(positions.end) + " of sequence " +
                           std::to_string(positions.sequence / apart));
  }
  if (positions.begin == positions.end) return Status::ok();
  const int64_t gone = context_.store->tables().first_group(positions.layer, positions.sequence) *
                       context_.options.group_tokens;
  if (positions.begin < gone) return dropped("read_back", positions.begin, gone);
  const int64_t count = positions.end - positions.begin;
  const int64_t head_dim = context_.plan.record_shape.head_dim;
  const int64_t value_width = context_.plan.record_shape.value_width();
  const TokenView target = {.keys = keys,
                            .values = values,
                            .key_head_stride = count * head_dim,
                            .key_token_stride = head_dim,
                            .value_head_stride = count * value_width,
                            .value_token_stride = value_width};
  KVSWAP_RETURN_IF_ERROR(read_sealed(positions, target));
  return read_tail(positions, target);
}

Status PrefixReader::read_sealed(const Positions& positions, const TokenView& target) {
  const int64_t group_tokens = context_.options.group_tokens;
  const int64_t end = std::min((positions.end + group_tokens - 1) / group_tokens,
                               batch_.layer(positions.layer).sealed_groups);
  int64_t group = positions.begin / group_tokens;
  if (group >= end) return Status::ok();
  auto blocks = this->blocks();
  if (!blocks.is_ok()) return blocks.status();
  std::byte* records = blocks.value().slots[0];
  const int64_t block = 2 * blocks.value().groups;
  std::vector<std::byte> room(context_.plan.group_bytes);
  PrefixPages listed;
  for (; group < end; group += block) {
    const Groups groups = {positions.layer, positions.sequence, group,
                           std::min(block, end - group)};
    KVSWAP_RETURN_IF_ERROR(load(groups, records, blocks.value().memory));
    KVSWAP_RETURN_IF_ERROR(list(groups, records, listed));
    for (int64_t i = 0; i < groups.count; ++i) {
      unpack(tokens(listed, i, room.data()), group + i, positions, target);
    }
  }
  return Status::ok();
}

Status PrefixReader::read_tail(const Positions& positions, const TokenView& target) {
  const int64_t group_tokens = context_.options.group_tokens;
  const int64_t end = (positions.end + group_tokens - 1) / group_tokens;
  int64_t group =
      std::max(positions.begin / group_tokens, batch_.layer(positions.layer).sealed_groups);
  std::vector<std::byte> record(context_.plan.group_bytes);
  for (; group < end; ++group) {
    KVSWAP_RETURN_IF_ERROR(context_.space->compute().download(
        record.data(), batch_.pages(positions.sequence).tail_page(positions.layer, group),
        context_.plan.group_bytes));
    unpack(record.data(), group, positions, target);
  }
  return Status::ok();
}

/// Those of the group's tokens that were asked for.
void PrefixReader::unpack(const std::byte* record, int64_t group, const Positions& positions,
                          const TokenView& target) const {
  const int64_t group_tokens = context_.options.group_tokens;
  const int64_t first = std::max(positions.begin, group * group_tokens);
  const int64_t last = std::min(positions.end, (group + 1) * group_tokens);
  void* base = const_cast<std::byte*>(record);
  const int64_t first_token = first - positions.begin;
  const auto slot = static_cast<int32_t>(first - group * group_tokens);
  const auto length = static_cast<int32_t>(last - first);
  unpack_records({.shape = context_.plan.record_shape,
                  .tokens = target,
                  .records = &base,
                  .first_tokens = &first_token,
                  .slots = &slot,
                  .lengths = &length,
                  .count = 1});
}

}  // namespace kvswap
