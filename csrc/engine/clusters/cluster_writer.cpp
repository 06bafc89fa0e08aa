#include "engine/clusters/cluster_writer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "methods/clusters/cluster_selector.h"

namespace kvswap {

std::optional<ClusterPlan> ClusterWriter::plan(const TokenLocator& bytes, int64_t layer,
                                               int64_t sequence, int64_t cluster) const {
  const ClusterPages& pages = bytes.row().pages;
  const std::vector<int64_t> members = members_of(bytes.row().clusters, cluster);
  auto plan = pages.plan(cluster, members);
  if (!writes_apart()) return plan;
  const auto has_room = [&](std::span<const int64_t> slots, int64_t count) {
    return context_.store->places().has_room_beside(offsets_of(layer, sequence, slots), count);
  };
  std::vector<int64_t> held;
  if (!plan) pages.each_page(cluster, [&](int64_t slot) { held.push_back(slot); });
  if (plan ? has_room(plan->stay, std::ssize(plan->slots)) : has_room(held, 0)) return plan;
  plan = pages.plan(cluster, members, Pack::kAll);
  // After an error another cluster's tokens may still stand in what stays: all goes elsewhere.
  if (plan && !has_room(plan->stay, std::ssize(plan->slots))) plan->stay.clear();
  return plan;
}

bool ClusterWriter::writes_apart() const { return context_.plan.has_pools; }

std::vector<int64_t> ClusterWriter::offsets_of(int64_t layer, int64_t sequence,
                                               std::span<const int64_t> slots) const {
  std::vector<int64_t> offsets;
  for (const int64_t slot : slots) {
    offsets.push_back(context_.store->offset_bytes(layer, sequence, page_id(slot)));
  }
  return offsets;
}

Status ClusterWriter::write(TokenLocator& bytes, int64_t layer, int64_t sequence,
                            std::span<const ClusterPlan> plans) {
  if (!writes_apart()) return write_together(bytes, layer, sequence, plans, std::nullopt);
  for (const ClusterPlan& plan : plans) {
    const std::vector<int64_t> beside = offsets_of(layer, sequence, plan.stay);
    const std::vector<int64_t> instead = offsets_of(layer, sequence, plan.go);
    const auto offset = context_.store->places().take({.layer = layer,
                                                       .count = std::ssize(plan.slots),
                                                       .purpose = PlaceFor::kClusterPages,
                                                       .beside = beside,
                                                       .instead = instead});
    if (!offset.is_ok()) return offset.status();
    const bool is_before = !beside.empty() && offset.value() < beside.front();
    KVSWAP_RETURN_IF_ERROR(
        write_together(bytes, layer, sequence, {&plan, 1}, Place{offset.value(), is_before}));
  }
  return Status::ok();
}

Status ClusterWriter::write_together(TokenLocator& bytes, int64_t layer, int64_t sequence,
                                     std::span<const ClusterPlan> plans,
                                     const std::optional<Place>& place) {
  std::vector<Page> pages;
  for (const ClusterPlan& plan : plans) {
    for (int64_t i = 0; i < std::ssize(plan.slots); ++i) pages.push_back({&plan, i});
  }
  // The last page, which is not full, stands where it can be replaced from the other end.
  if (place && place->is_before_others) std::reverse(pages.begin(), pages.end());
  const auto run_max = static_cast<size_t>(context_.store->run_records_max());
  std::vector<RecordStore::StagedRun> runs;
  Status written;
  size_t done = 0;
  while (done < pages.size() && written.is_ok()) {
    const auto some = std::span(pages).subspan(done, std::min(run_max, pages.size() - done));
    std::optional<int64_t> at;
    if (place) at = place->offset_bytes + static_cast<int64_t>(done) * context_.stored_bytes();
    done += some.size();
    RecordStore::StagedRun run;
    written = stage(bytes, layer, some, at, &run);
    if (!written.is_ok()) break;
    // Only where nothing is to be packed any more: it may be what the pages hold.
    if (some.size() == pages.size()) adopt(bytes, run, sequence);
    written = context_.store->hand_over(run);
    runs.push_back(std::move(run));
  }
  if (!written.is_ok()) {
    for (const RecordStore::StagedRun& run : runs) {
      for (int64_t i = 0; i < run.count; ++i) {
        bytes.pages().map(layer).forget(context_.store->records().key(run.entries[i].record));
        context_.store->tables().give_up(run.entries[i].record);
      }
    }
    const int64_t first = place ? place->offset_bytes / context_.stored_bytes() : 0;
    for (size_t i = done; place && i < pages.size(); ++i) {
      context_.store->places().release(static_cast<uint32_t>(first + i));
    }
    context_.store->writes().drop_unread();
    return written;
  }
  install(bytes, layer, sequence, plans, runs);
  context_.counters.cluster_records_sealed += pages.size();
  return Status::ok();
}

Status ClusterWriter::stage(const TokenLocator& bytes, int64_t layer, std::span<const Page> pages,
                            std::optional<int64_t> taken_bytes, RecordStore::StagedRun* run) {
  auto staged = context_.store->stage(layer, std::ssize(pages), taken_bytes);
  if (!staged.is_ok()) return staged.status();
  *run = std::move(staged.value());
  std::vector<int64_t> ids;
  for (size_t i = 0; i < pages.size(); ++i) {
    pack(bytes, pages[i], run->data() + static_cast<int64_t>(i) * context_.record_bytes());
    ids.push_back(page_id(pages[i].slot()));
  }
  context_.store->enter_pages(*run, ids);
  return Status::ok();
}

void ClusterWriter::pack(const TokenLocator& bytes, const Page& page, std::byte* record) const {
  const RecordShape shape = context_.plan.record_shape;
  const std::vector<int64_t>& tokens = page.plan->tokens;
  const int64_t first = page.index * shape.group_tokens;
  const int64_t count = std::min(shape.group_tokens, std::ssize(tokens) - first);
  if (count < shape.group_tokens) std::memset(record, 0, shape.payload_bytes());
  for (int64_t i = 0; i < count; ++i) put_token(shape, record, i, bytes.at(tokens[first + i]));
}

/// What the reuse buffer has of a slot becomes what the slot will hold, and as it will be read.
void ClusterWriter::adopt(const TokenLocator& bytes, const RecordStore::StagedRun& run,
                          int64_t sequence) {
  const RecordPacking* packing = context_.store->form().packing.get();
  std::vector<std::byte> packed(packing == nullptr ? 0 : packing->payload_bytes());
  for (int64_t i = 0; i < run.count; ++i) {
    const int64_t id = run.entries[i].group;
    if (bytes.row().pages.mask(slot_of_page(id)) == 0) continue;
    const int32_t page =
        bytes.pages().map(run.layer).rename(context_.store->key(run.layer, sequence, id),
                                            context_.store->records().key(run.entries[i].record));
    if (page < 0) continue;
    const std::byte* record = run.data() + i * context_.record_bytes();
    std::byte* held = bytes.pages().page(page);
    if (packing == nullptr) {
      std::memcpy(held, record, context_.plan.payload_bytes);
      continue;
    }
    packing->pack(record, packed.data());
    packing->unpack(packed.data(), held);
  }
}

void ClusterWriter::install(TokenLocator& bytes, int64_t layer, int64_t sequence,
                            std::span<const ClusterPlan> plans,
                            std::span<const RecordStore::StagedRun> runs) {
  const RecordShape shape = context_.plan.record_shape;
  ClusterPages& row = bytes.row().pages;
  PageMap& map = bytes.pages().map(layer);
  for (const RecordStore::StagedRun& run : runs) {
    for (int64_t i = 0; i < run.count; ++i) {
      const int64_t id = run.entries[i].group;
      if (row.mask(slot_of_page(id)) != 0) map.forget(context_.store->key(layer, sequence, id));
      context_.store->tables().set_page(layer, sequence, id, run.entries[i].record);
      bytes.forget_read(slot_of_page(id));
    }
  }
  for (const ClusterPlan& plan : plans) {
    for (const int64_t token : plan.tokens) {
      if (row.waiting_at(token) >= 0) end_wait(shape, bytes.pages(), layer, row, token);
    }
    release_slots(context_, bytes.pages(), layer, sequence, row.install(plan));
  }
}

}  // namespace kvswap
