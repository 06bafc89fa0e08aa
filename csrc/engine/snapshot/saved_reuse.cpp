#include "engine/snapshot/saved_reuse.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "engine/backend/fetcher.h"
#include "engine/snapshot/saved_clusters.h"
#include "engine/snapshot/tensor_names.h"
#include "methods/clusters/cluster_selector.h"

namespace kvswap {
namespace {

constexpr const char* kPlanName = "reuse_plan";
constexpr int32_t kNoLayer = -1;  // of a record that no table has any more
constexpr uint64_t kStepsMost = uint64_t{1} << 40;

/// A page of a reuse buffer, as it is saved.
struct SavedPage {
  uint64_t loaded_step = 0;
  uint64_t used_step = 0;
  uint64_t updated_step = 0;
  int32_t sequence = 0;
  int32_t page = 0;
  int32_t layer = kNoLayer;
  int32_t id = 0;  // of the group, or of a cluster's page
  int32_t cluster_pages = 1;
  float score = 0;
};
constexpr int64_t kWords = sizeof(SavedPage) / sizeof(uint32_t);
static_assert(sizeof(SavedPage) == 48);

/// What reuse buffers are alike in, or a session cannot take another's.
std::vector<uint32_t> plan_of(const EngineContext& context) {
  return {static_cast<uint32_t>(context.plan.page_layers),
          static_cast<uint32_t>(context.options.pages_max),
          static_cast<uint32_t>(context.plan.replacement)};
}

int64_t maps_of(const EngineContext& context) { return context.plan.page_layers; }

/// Calls with each record that a table of a sequence has in the layers of one map.
template <typename Call>
void each_record(const EngineContext& context, const Batch& batch, int64_t map, int64_t sequence,
                 const Call& call) {
  for (int64_t layer = map; layer < context.options.layers; layer += maps_of(context)) {
    const int64_t groups = batch.layer(layer).sealed_groups;
    for (int64_t group = 0; group < groups; ++group) call(layer, group);
    if (context.clusters_of(layer) == nullptr) continue;
    for (const int64_t id : cluster_page_ids(context.clusters->of(layer, sequence)))
      call(layer, id);
  }
}

template <typename T>
SavedTensor tensor_of(std::string name, const char* dtype, std::vector<int64_t> shape,
                      std::vector<T> values) {
  const auto held = std::make_shared<const std::vector<T>>(std::move(values));
  const int64_t row_bytes = std::ssize(*held) * int64_t{sizeof(T)} / shape.front();
  return {std::move(name), dtype, std::move(shape), row_bytes,
          [held, row_bytes](int64_t first, int64_t rows, std::byte* target) {
            std::memcpy(target,
                        reinterpret_cast<const std::byte*>(held->data()) + first * row_bytes,
                        rows * row_bytes);
            return Status::ok();
          }};
}

void list_map(const EngineContext& context, const Batch& batch, int64_t map,
              std::vector<SavedTensor>& tensors) {
  std::vector<SavedPage> saved;
  std::vector<uint64_t> steps;
  for (int64_t sequence = 0; sequence < batch.size(); ++sequence) {
    const PageMap& pages = batch.pages(sequence).map(map);
    std::map<int32_t, std::pair<int64_t, int64_t>> records;
    each_record(context, batch, map, sequence, [&](int64_t layer, int64_t id) {
      const int32_t page = pages.find(context.store->key(layer, sequence, id));
      if (page >= 0) records[page] = {layer, id};
    });
    for (const PageMap::Held& held : pages.held()) {
      const auto known = records.find(held.page);
      const auto [layer, id] =
          known == records.end() ? std::pair<int64_t, int64_t>{kNoLayer, 0} : known->second;
      saved.push_back({.loaded_step = held.state.loaded_step,
                       .used_step = held.state.used_step,
                       .updated_step = held.cluster.updated_step,
                       .sequence = static_cast<int32_t>(sequence),
                       .page = held.page,
                       .layer = static_cast<int32_t>(layer),
                       .id = static_cast<int32_t>(id),
                       .cluster_pages = held.cluster.pages,
                       .score = held.state.score});
    }
    steps.push_back(pages.step());
    steps.push_back(pages.held().size());
  }
  tensors.push_back(
      tensor_of(saved_name(map, "reuse_steps"), "U64", {batch.size(), 2}, std::move(steps)));
  if (saved.empty()) return;
  const auto count = std::ssize(saved);
  tensors.push_back(tensor_of(saved_name(map, "reuse"), "U32", {count, kWords}, std::move(saved)));
}

/// Is it a page of that map, and of a record that is there?
bool is_page(const EngineContext& context, const SavedPage& saved, const PageMap& map,
             uint64_t step) {
  const bool is_known = saved.page >= map.first_page() &&
                        saved.page - map.first_page() < map.pages() &&
                        saved.loaded_step <= saved.used_step && saved.used_step <= step &&
                        saved.updated_step <= std::max<uint64_t>(1, step);
  return is_known && saved.cluster_pages >= 1 &&
         saved.cluster_pages <= pages_a_cluster(context.plan.method) &&
         std::isfinite(saved.score) && saved.score >= 0;
}

bool has_record(const EngineContext& context, const Batch& batch, int64_t map,
                const SavedPage& saved) {
  if (saved.layer < 0 || saved.layer >= context.options.layers ||
      saved.layer % maps_of(context) != map) {
    return false;
  }
  if (!is_page_id(saved.id)) return saved.id < batch.layer(saved.layer).sealed_groups;
  return context.clusters_of(saved.layer) != nullptr &&
         context.store->tables().has_page(saved.layer, saved.sequence, saved.id);
}

/// The bytes of what one sequence's map holds.
Status read_pages(EngineContext& context, SequencePages& pages, std::span<const SavedPage> saved) {
  std::map<int64_t, std::vector<Load>> loads;  // of layers
  for (const SavedPage& one : saved) {
    if (one.layer == kNoLayer) continue;
    std::byte* page = pages.page(one.page);
    loads[one.layer].push_back({.sequence = one.sequence,
                                .group = one.id,
                                .page = one.page,
                                .target = page,
                                .home = page});
  }
  for (const auto& [layer, of_layer] : loads) {
    for (size_t first = 0; first < of_layer.size();) {
      const size_t some = std::min<size_t>(of_layer.size() - first, context.options.groups_max);
      Fetch fetch;
      fetch.layer = layer;
      fetch.loads.assign(of_layer.begin() + first, of_layer.begin() + first + some);
      KVSWAP_RETURN_IF_ERROR(context.fetcher->submit(fetch));
      Status arrived = context.fetcher->finish(fetch);
      if (arrived.is_pending()) context.fetcher->abandon(fetch, pages.memory());
      KVSWAP_RETURN_IF_ERROR(arrived);
      first += some;
    }
  }
  return Status::ok();
}

Status load_map(EngineContext& context, Batch& batch, int64_t map, const SavedCounts& counts,
                const SavedTensors& saved) {
  const std::string steps_name = saved_name(map, "reuse_steps");
  const std::string name = saved_name(map, "reuse");
  const int64_t step_sizes[] = {counts.sequences, 2};
  auto found = saved.get(steps_name, "U64", step_sizes);
  if (!found.is_ok()) return found.status();
  const std::vector<uint64_t> steps = copied<uint64_t>(found.value());
  int64_t count = 0;
  for (int64_t sequence = 0; sequence < counts.sequences; ++sequence) {
    const auto most = static_cast<uint64_t>(batch.pages(sequence).map(map).pages());
    if (steps[2 * sequence] > kStepsMost || steps[2 * sequence + 1] > most) {
      return saved.refuse(steps_name, "count steps and pages that may be");
    }
    count += static_cast<int64_t>(steps[2 * sequence + 1]);
  }
  std::vector<SavedPage> all;
  if (count > 0) {
    const int64_t sizes[] = {count, kWords};
    auto pages = saved.get(name, "U32", sizes);
    if (!pages.is_ok()) return pages.status();
    all = copied<SavedPage>(pages.value());
  }
  int64_t first = 0;
  for (int64_t sequence = 0; sequence < counts.sequences; ++sequence) {
    SequencePages& pages = batch.pages(sequence);
    const auto some = static_cast<int64_t>(steps[2 * sequence + 1]);
    const auto of_row = std::span(all).subspan(first, some);
    first += some;
    std::set<int32_t> taken;
    std::set<uint64_t> keys;
    std::vector<PageMap::Held> held;
    for (const SavedPage& one : of_row) {
      const bool is_there = one.sequence == sequence && taken.insert(one.page).second &&
                            is_page(context, one, pages.map(map), steps[2 * sequence]);
      if (!is_there || (one.layer != kNoLayer && !has_record(context, batch, map, one))) {
        return saved.refuse(name, "name pages of its reuse buffer and records that are there");
      }
      // Serials begin at 1: no record has a key without one.
      const uint64_t key = one.layer == kNoLayer ? static_cast<uint64_t>(one.page)
                                                 : context.store->key(one.layer, sequence, one.id);
      if (!keys.insert(key).second) return saved.refuse(name, "name each record once");
      held.push_back({one.page,
                      {.key = key,
                       .loaded_step = one.loaded_step,
                       .used_step = one.used_step,
                       .is_filled = true,
                       .score = one.score},
                      {one.cluster_pages, one.updated_step}});
    }
    KVSWAP_RETURN_IF_ERROR(read_pages(context, pages, of_row));
    pages.map(map).restore(steps[2 * sequence], held);
  }
  return Status::ok();
}

void list_chosen(const Batch& batch, const Groups& chosen, int64_t layer,
                 std::vector<SavedTensor>& tensors) {
  std::vector<uint32_t> sizes(batch.size());
  std::vector<int32_t> ids;
  for (int64_t row = 0; row < std::min(batch.size(), std::ssize(chosen)); ++row) {
    sizes[row] = static_cast<uint32_t>(chosen[row].size());
    ids.insert(ids.end(), chosen[row].begin(), chosen[row].end());
  }
  tensors.push_back(
      tensor_of(saved_name(layer, "chosen_sizes"), "U32", {batch.size()}, std::move(sizes)));
  if (ids.empty()) return;
  const auto count = std::ssize(ids);
  tensors.push_back(tensor_of(saved_name(layer, "chosen"), "I32", {count}, std::move(ids)));
}

Status load_chosen(LayerStep& step, int64_t layer, const SavedCounts& counts,
                   const SavedTensors& saved) {
  const int64_t rows[] = {counts.sequences};
  auto found = saved.get(saved_name(layer, "chosen_sizes"), "U32", rows);
  if (!found.is_ok()) return found.status();
  const std::vector<uint32_t> sizes = copied<uint32_t>(found.value());
  int64_t count = 0;
  for (const uint32_t size : sizes) count += size;
  std::vector<int32_t> ids;
  const std::string name = saved_name(layer, "chosen");
  if (count > 0) {
    const int64_t shape[] = {count};
    auto read = saved.get(name, "I32", shape);
    if (!read.is_ok()) return read.status();
    ids = copied<int32_t>(read.value());
  }
  Groups chosen;
  auto next = ids.begin();
  for (const uint32_t size : sizes) {
    const std::vector<int32_t>& of_row = chosen.emplace_back(next, next + size);
    next += size;
    // A page may be gone since; a group is not.
    const bool are_there = std::ranges::all_of(
        of_row, [&](int32_t id) { return is_page_id(id) || id < counts.groups; });
    if (!are_there || std::set(of_row.begin(), of_row.end()).size() != of_row.size()) {
      return saved.refuse(name, "name groups that are there, each once");
    }
  }
  step.set_last(chosen);
  step.set_chosen(std::move(chosen));
  return Status::ok();
}

}  // namespace

void list_reuse(EngineContext& context, Batch& batch, StepCoordinator& steps,
                std::vector<SavedTensor>& tensors) {
  if (context.plan.has_clusters) {
    tensors.push_back(tensor_of(kPlanName, "U32", {3}, plan_of(context)));
    for (int64_t map = 0; map < maps_of(context); ++map) list_map(context, batch, map, tensors);
  } else if (!context.options.new_group_ratio) {
    return;
  }
  for (int64_t layer = 0; layer < context.options.layers; ++layer) {
    const LayerStep& step = steps.of(layer);
    list_chosen(batch, context.plan.has_clusters ? step.chosen() : step.last(), layer, tensors);
  }
}

Status load_reuse(EngineContext& context, Batch& batch, StepCoordinator& steps,
                  const SavedCounts& counts, const SavedTensors& saved) {
  if (context.plan.has_clusters) {
    const int64_t sizes[] = {3};
    auto found = saved.get(kPlanName, "U32", sizes);
    if (!found.is_ok()) return found.status();
    if (copied<uint32_t>(found.value()) != plan_of(context)) return Status::ok();
    for (int64_t map = 0; map < maps_of(context); ++map) {
      KVSWAP_RETURN_IF_ERROR(load_map(context, batch, map, counts, saved));
    }
  } else if (!context.options.new_group_ratio || !saved.has(saved_name(0, "chosen_sizes"))) {
    return Status::ok();
  }
  for (int64_t layer = 0; layer < context.options.layers; ++layer) {
    KVSWAP_RETURN_IF_ERROR(load_chosen(steps.of(layer), layer, counts, saved));
  }
  return Status::ok();
}

}  // namespace kvswap
