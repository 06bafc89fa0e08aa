#include "engine/snapshot/snapshot_reader.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/snapshot/saved_clusters.h"
#include "engine/snapshot/saved_retention.h"
#include "engine/snapshot/saved_reuse.h"
#include "engine/snapshot/tensor_names.h"
#include "kernels/float8_exponent.h"
#include "kernels/records.h"

namespace kvswap {
namespace {

const bool* as_bools(const SavedBytes& flags) {
  return reinterpret_cast<const bool*>(flags.data());
}

/// Of rows of `width` numbers the first `rank`: those of the projection of that rank.
void narrow(std::vector<float>& matrix, int64_t width, int64_t rank) {
  if (rank == width) return;
  const auto rows = std::ssize(matrix) / width;
  for (int64_t row = 1; row < rows; ++row) {
    std::copy_n(matrix.begin() + row * width, rank, matrix.begin() + row * rank);
  }
  matrix.resize(rows * rank);
}

}  // namespace

Status SnapshotReader::check(const SavedCounts& counts, const SavedTensors& saved) const {
  const EngineOptions& options = context_.options;
  KVSWAP_ASSERT(batch_.size() == 0 && options.base != nullptr);
  if (counts.sequences < 1 || counts.positions < 1 || counts.positions > kContextMax ||
      counts.sequences > kBatchMax * options.heads_apart ||
      counts.sequences % options.heads_apart != 0) {
    return saved.refuse("validity", "be of a batch that holds tokens");
  }
  if (counts.groups != options.sealed_groups(counts.positions)) {
    return saved.refuse("table", "hold the " +
                                     std::to_string(options.sealed_groups(counts.positions)) +
                                     " groups that these settings seal of " +
                                     std::to_string(counts.positions) + " tokens");
  }
  if (options.max_context > 0 && counts.positions > options.max_context) {
    return Status::budget("open: max_context must be at least the " +
                          std::to_string(counts.positions) + " tokens that were saved, got " +
                          std::to_string(options.max_context));
  }
  return Status::ok();
}

Status SnapshotReader::load(const SavedCounts& counts, const SavedTensors& saved,
                            SummaryStore* shared) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter());
  return calls_.leave(fill(counts, saved, [&] {
    KVSWAP_RETURN_IF_ERROR(load_projections(saved, context_.options.ranks));
    return shared != nullptr ? share_summaries(counts.groups, *shared)
                             : load_summaries(counts, saved);
  }));
}

Status SnapshotReader::load_narrower(const SavedCounts& counts, const SavedTensors& saved,
                                     std::span<const int64_t> saved_ranks) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter());
  Status loaded =
      fill(counts, saved, [&] { return account_.charge_loaded(batch_, counts.groups, 0); });
  if (loaded.is_ok()) loaded = load_projections(saved, saved_ranks);
  return calls_.leave(std::move(loaded));
}

Status SnapshotReader::fill(const SavedCounts& counts, const SavedTensors& saved,
                            const std::function<Status()>& summarise) {
  KVSWAP_RETURN_IF_ERROR(check(counts, saved));
  KVSWAP_RETURN_IF_ERROR(batch_.begin(counts.sequences, counts.positions));
  KVSWAP_RETURN_IF_ERROR(load_validity(counts, saved));
  KVSWAP_RETURN_IF_ERROR(make_cluster_room(counts, saved));
  KVSWAP_RETURN_IF_ERROR(summarise());
  if (counts.groups > 0) KVSWAP_RETURN_IF_ERROR(load_tables(counts, saved));
  for (int64_t layer = 0; layer < context_.options.layers; ++layer) {
    batch_.layer(layer) = {counts.positions, counts.groups, counts.groups};
    KVSWAP_RETURN_IF_ERROR(load_sinks(layer, counts, saved));
    KVSWAP_RETURN_IF_ERROR(load_retained(context_, batch_, {layer, counts}, saved));
    KVSWAP_RETURN_IF_ERROR(load_waiting(context_, batch_, layer, saved));
    KVSWAP_RETURN_IF_ERROR(load_tail(layer, counts, saved));
  }
  return load_reuse(context_, batch_, steps_, counts, saved);
}

Status SnapshotReader::load_validity(const SavedCounts& counts, const SavedTensors& saved) {
  auto valid = flags("validity", counts, saved);
  if (!valid.is_ok()) return valid.status();
  if (!saved.has("came_valid")) {
    batch_.declare(counts.positions, as_bools(valid.value()));
    return Status::ok();
  }
  auto came = flags("came_valid", counts, saved);
  if (!came.is_ok()) return came.status();
  const int64_t apart = context_.options.heads_apart;
  const bool* const is_valid = as_bools(valid.value());
  const bool* const came_valid = as_bools(came.value());
  std::vector<std::vector<int64_t>> later_padding(counts.sequences);
  for (int64_t i = 0; i < counts.sequences / apart * counts.positions; ++i) {
    if (is_valid[i] && !came_valid[i]) {
      return saved.refuse("came_valid", "hold 1 for each token that is valid");
    }
    for (int64_t head = 0; came_valid[i] && !is_valid[i] && head < apart; ++head) {
      later_padding[i / counts.positions * apart + head].push_back(i % counts.positions);
    }
  }
  batch_.declare(counts.positions, came_valid);
  batch_.change_validity([&](int64_t sequence, PaddingMask& validity) {
    validity.set_later_padding(std::move(later_padding[sequence]));
  });
  return Status::ok();
}

/// One for each token of each caller's sequence.
Result<SavedBytes> SnapshotReader::flags(const char* name, const SavedCounts& counts,
                                         const SavedTensors& saved) const {
  const int64_t sizes[] = {counts.sequences / context_.options.heads_apart, counts.positions};
  auto found = saved.get(name, "BOOL", sizes);
  if (!found.is_ok()) return found.status();
  const std::span<const std::byte> bytes = found.value();
  if (std::ranges::any_of(bytes, [](std::byte flag) { return flag > std::byte{1}; })) {
    return saved.refuse(name, "hold 0 or 1 for each token");
  }
  return found;
}

Status SnapshotReader::load_projections(const SavedTensors& saved,
                                        std::span<const int64_t> saved_ranks) {
  const EngineOptions& options = context_.options;
  KVSWAP_ASSERT(saved_ranks.size() == options.ranks.size());
  for (size_t layer = 0; layer < options.ranks.size(); ++layer) {
    const auto index = static_cast<int64_t>(layer);
    // Both, or none where there is no summary either: a layer that lacked one would choose nothing.
    if (!saved.has(projection_name(index, true)) && !saved.has(projection_name(index, false)) &&
        !saved.has(saved_name(index, "summary"))) {
      continue;
    }
    const int64_t rank = options.ranks[layer];
    if (rank > saved_ranks[layer]) continue;  // too narrow: the layer begins without one
    const int64_t sizes[] = {options.heads_apart * options.kv_heads * options.head_dim,
                             saved_ranks[layer]};
    std::vector<float> both[2];
    for (const bool is_key : {true, false}) {
      const std::string name = projection_name(index, is_key);
      auto found = saved.get(name, "F32", sizes);
      if (!found.is_ok()) return found.status();
      std::vector<float>& matrix = both[is_key ? 0 : 1];
      matrix = copied<float>(found.value());
      if (!std::ranges::all_of(matrix, [](float one) { return std::isfinite(one); })) {
        return saved.refuse(name, "be finite");
      }
      narrow(matrix, saved_ranks[layer], rank);
    }
    KVSWAP_RETURN_IF_ERROR(editor_.set_projection(index, rank, both[0].data(), both[1].data()));
  }
  return Status::ok();
}

Status SnapshotReader::make_cluster_room(const SavedCounts& counts, const SavedTensors& saved) {
  for (int64_t layer = 0; layer < context_.options.layers; ++layer) {
    auto room = saved_cluster_room(context_, layer, counts, saved);
    if (!room.is_ok()) return room.status();
    KVSWAP_RETURN_IF_ERROR(account_.charge_cluster_room(batch_, layer, room.value()));
  }
  return Status::ok();
}

Status SnapshotReader::load_summaries(const SavedCounts& counts, const SavedTensors& saved) {
  const int64_t tokens = counts.groups * context_.options.group_tokens;
  int64_t bytes = 0;
  for (int64_t layer = 0; layer < context_.options.layers; ++layer) {
    auto of_layer = context_.selector->summaries().bytes_to_load(layer, tokens, saved);
    if (!of_layer.is_ok()) return of_layer.status();
    bytes += of_layer.value();
  }
  KVSWAP_RETURN_IF_ERROR(account_.charge_loaded(batch_, counts.groups, bytes));
  for (int64_t layer = 0; layer < context_.options.layers; ++layer) {
    KVSWAP_RETURN_IF_ERROR(context_.selector->summaries().load(layer, tokens, saved));
  }
  return Status::ok();
}

/// Held, and so charged, by each that shares them: any of them may be the last to be closed.
Status SnapshotReader::share_summaries(int64_t groups, SummaryStore& shared) {
  int64_t bytes = 0;
  for (int64_t layer = 0; layer < context_.options.layers; ++layer) {
    bytes += shared.bytes(layer);
  }
  KVSWAP_RETURN_IF_ERROR(account_.charge_loaded(batch_, groups, bytes));
  for (int64_t layer = 0; layer < context_.options.layers; ++layer) {
    context_.selector->summaries().share(layer, shared);
  }
  return Status::ok();
}

Status SnapshotReader::load_tables(const SavedCounts& counts, const SavedTensors& saved) {
  const int64_t sizes[] = {counts.records, 3};
  auto found = saved.get("records", "U32", sizes);
  if (!found.is_ok()) return found.status();
  SavedTables tables;
  tables.records = copied<SavedRecord>(found.value());
  KVSWAP_RETURN_IF_ERROR(load_exponents(counts, saved, tables));
  const int64_t places = context_.options.base->end_bytes / context_.stored_bytes();
  if (!std::ranges::all_of(tables.records,
                           [places](const SavedRecord& record) { return record.place < places; })) {
    return saved.refuse("records", "lie in the file of records");
  }
  for (int64_t layer = 0; layer < context_.options.layers; ++layer) {
    const std::string name = saved_name(layer, "table");
    const int64_t table_sizes[] = {counts.sequences, counts.groups};
    auto table = saved.get(name, "U32", table_sizes);
    if (!table.is_ok()) return table.status();
    auto& of_layer = tables.tables.emplace_back();
    const size_t bytes = counts.groups * sizeof(uint32_t);
    for (int64_t sequence = 0; sequence < counts.sequences; ++sequence) {
      of_layer.push_back(copied<uint32_t>(table.value().subspan(sequence * bytes, bytes)));
      if (std::ranges::any_of(of_layer.back(),
                              [&](uint32_t number) { return number >= tables.records.size(); })) {
        return saved.refuse(name, "name records that are there");
      }
    }
  }
  KVSWAP_RETURN_IF_ERROR(load_clusters(context_, batch_, counts, saved, tables));
  context_.store->restore(tables);
  return Status::ok();
}

Status SnapshotReader::load_exponents(const SavedCounts& counts, const SavedTensors& saved,
                                      SavedTables& tables) {
  if (!context_.plan.has_float8_records) return Status::ok();
  const int64_t sizes[] = {counts.records, context_.options.kv_heads, 2};
  auto found = saved.get("exponents", "I8", sizes);
  if (!found.is_ok()) return found.status();
  tables.notes = copied<int8_t>(found.value());
  const DType dtype = context_.options.dtype;
  if (!std::ranges::all_of(tables.notes, [dtype](int8_t one) { return is_float8(one, dtype); })) {
    return saved.refuse("exponents", "be those of records in e4m3");
  }
  return Status::ok();
}

Status SnapshotReader::load_sinks(int64_t layer, const SavedCounts& counts,
                                  const SavedTensors& saved) {
  int64_t count = 0;
  for (int64_t sequence = 0; sequence < counts.sequences; ++sequence) {
    for (int64_t group = 0; group < counts.groups; ++group) {
      count += batch_.is_sink(sequence, group) ? 1 : 0;
    }
  }
  if (count == 0) return Status::ok();
  const std::string name = saved_name(layer, "sinks");
  const int64_t sizes[] = {count, 2};
  auto sinks = saved.get(name, "U32", sizes);
  if (!sinks.is_ok()) return sinks.status();
  auto records = saved.get(saved_name(layer, "sink_records"), saved_dtype(context_.options.dtype),
                           saved_page_sizes(context_.plan.record_shape, count));
  if (!records.is_ok()) return records.status();
  const std::vector<uint32_t> places = copied<uint32_t>(sinks.value());
  const int64_t bytes = context_.plan.group_bytes;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t sequence = places[2 * i];
    const uint32_t group = places[2 * i + 1];
    if (sequence >= counts.sequences || group >= counts.groups ||
        !batch_.is_sink(sequence, group) || batch_.is_pinned(layer, sequence, group)) {
      return saved.refuse(name, "name the groups of each sequence's first tokens, each once");
    }
    SequencePages& pages = batch_.pages(sequence);
    std::vector<int32_t>& pinned = pages.sinks(layer);
    std::byte* page = pages.sink_page(layer, static_cast<int64_t>(pinned.size()));
    KVSWAP_RETURN_IF_ERROR(
        context_.space->compute().upload(page, records.value().data() + i * bytes, bytes));
    pinned.push_back(static_cast<int32_t>(group));
  }
  return Status::ok();
}

Status SnapshotReader::load_tail(int64_t layer, const SavedCounts& counts,
                                 const SavedTensors& saved) {
  const EngineOptions& options = context_.options;
  const int64_t begin = counts.groups * options.group_tokens;
  const int64_t newest = counts.positions - begin;
  if (newest == 0) return Status::ok();
  RecordShape tail = context_.plan.record_shape;
  tail.group_tokens = newest;
  auto found = saved.get(saved_name(layer, "tail"), saved_dtype(options.dtype),
                         saved_tail_sizes(tail, counts.sequences));
  if (!found.is_ok()) return found.status();
  const int64_t groups = (newest + options.group_tokens - 1) / options.group_tokens;
  const int64_t group_bytes = context_.plan.group_bytes;
  const size_t row = found.value().size() / counts.sequences;
  // Of one side: its values are its keys.
  const int64_t value_bytes =
      (tail.sides - 1) * tail.kv_heads * tail.side_elements(0) * tail.element_bytes;
  std::vector<std::byte> records(groups * group_bytes);
  for (int64_t sequence = 0; sequence < counts.sequences; ++sequence) {
    std::vector<std::byte> tokens = copied<std::byte>(found.value().subspan(sequence * row, row));
    std::vector<void*> targets;
    std::vector<int64_t> first_tokens;
    std::vector<int32_t> lengths;
    for (int64_t group = 0; group < groups; ++group) {
      targets.push_back(records.data() + group * group_bytes);
      first_tokens.push_back(group * options.group_tokens);
      lengths.push_back(static_cast<int32_t>(
          std::min(options.group_tokens, newest - group * options.group_tokens)));
    }
    pack_records({.shape = context_.plan.record_shape,
                  .tokens = {.keys = tokens.data(),
                             .values = tokens.data() + value_bytes,
                             .key_head_stride = tail.side_elements(0),
                             .key_token_stride = tail.head_dim,
                             .value_head_stride = tail.side_elements(1),
                             .value_token_stride = tail.value_width()},
                  .records = targets.data(),
                  .first_tokens = first_tokens.data(),
                  .lengths = lengths.data(),
                  .count = groups});
    for (int64_t group = 0; group < groups; ++group) {
      KVSWAP_RETURN_IF_ERROR(context_.space->compute().upload(
          batch_.pages(sequence).tail_page(layer, counts.groups + group),
          records.data() + group * group_bytes, context_.plan.group_bytes));
    }
  }
  return Status::ok();
}

}  // namespace kvswap
