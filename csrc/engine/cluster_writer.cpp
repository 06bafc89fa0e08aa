#include "engine/cluster_writer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "methods/cluster_selector.h"

namespace kvswap {

Status ClusterWriter::write(ClusterBytes& bytes, int64_t layer, int64_t sequence,
                            std::span<const ClusterPlan> plans) {
  std::vector<Page> pages;
  for (const ClusterPlan& plan : plans) {
    for (int64_t i = 0; i < std::ssize(plan.slots); ++i) pages.push_back({&plan, i});
  }
  const auto run_max = static_cast<size_t>(parts_.store->run_records_max());
  std::vector<RecordStore::StagedRun> runs;
  Status written;
  for (size_t done = 0; done < pages.size() && written.is_ok(); done += run_max) {
    const auto some = std::span(pages).subspan(done, std::min(run_max, pages.size() - done));
    RecordStore::StagedRun run;
    written = stage(bytes, layer, some, &run);
    if (!written.is_ok()) break;
    // Only where nothing is to be packed any more: it may be what the pages hold.
    if (some.size() == pages.size()) adopt(bytes, run, sequence);
    written = parts_.store->hand_over(run);
    runs.push_back(std::move(run));
  }
  if (!written.is_ok()) {
    for (const RecordStore::StagedRun& run : runs) {
      for (int64_t i = 0; i < run.count; ++i) {
        bytes.pages().map(layer).forget(parts_.store->records().key(run.entries[i].record));
        parts_.store->tables().give_up(run.entries[i].record);
      }
    }
    parts_.store->writes().drop_unread();
    return written;
  }
  install(bytes, layer, sequence, plans, runs);
  parts_.counters.cluster_records_sealed += pages.size();
  return Status::ok();
}

Status ClusterWriter::stage(const ClusterBytes& bytes, int64_t layer, std::span<const Page> pages,
                            RecordStore::StagedRun* run) {
  auto staged = parts_.store->stage(layer, std::ssize(pages));
  if (!staged.is_ok()) return staged.status();
  *run = std::move(staged.value());
  std::vector<int64_t> ids;
  for (size_t i = 0; i < pages.size(); ++i) {
    pack(bytes, pages[i], run->data() + static_cast<int64_t>(i) * parts_.record_bytes());
    ids.push_back(page_id(pages[i].slot()));
  }
  parts_.store->enter_pages(*run, ids);
  return Status::ok();
}

void ClusterWriter::pack(const ClusterBytes& bytes, const Page& page, std::byte* record) const {
  const RecordShape shape = parts_.options.record_shape();
  const std::vector<int64_t>& tokens = page.plan->tokens;
  const int64_t first = page.index * shape.group_tokens;
  const int64_t count = std::min(shape.group_tokens, std::ssize(tokens) - first);
  if (count < shape.group_tokens) std::memset(record, 0, shape.payload_bytes());
  for (int64_t i = 0; i < count; ++i) put_token(shape, record, i, bytes.at(tokens[first + i]));
}

/// What the reuse buffer has of a slot becomes what the slot will hold.
void ClusterWriter::adopt(const ClusterBytes& bytes, const RecordStore::StagedRun& run,
                          int64_t sequence) {
  for (int64_t i = 0; i < run.count; ++i) {
    const int64_t id = run.entries[i].group;
    if (bytes.row().pages.mask(slot_of_page(id)) == 0) continue;
    const int32_t page =
        bytes.pages().map(run.layer).rename(parts_.store->key(run.layer, sequence, id),
                                            parts_.store->records().key(run.entries[i].record));
    if (page < 0) continue;
    std::memcpy(bytes.pages().page(page), run.data() + i * parts_.record_bytes(),
                parts_.options.payload_bytes());
  }
}

void ClusterWriter::install(ClusterBytes& bytes, int64_t layer, int64_t sequence,
                            std::span<const ClusterPlan> plans,
                            std::span<const RecordStore::StagedRun> runs) {
  const RecordShape shape = parts_.options.record_shape();
  ClusterPages& row = bytes.row().pages;
  PageMap& map = bytes.pages().map(layer);
  for (const RecordStore::StagedRun& run : runs) {
    for (int64_t i = 0; i < run.count; ++i) {
      const int64_t id = run.entries[i].group;
      if (row.mask(slot_of_page(id)) != 0) map.forget(parts_.store->key(layer, sequence, id));
      parts_.store->tables().set_page(layer, sequence, id, run.entries[i].record);
    }
  }
  for (const ClusterPlan& plan : plans) {
    for (const int64_t token : plan.tokens) {
      if (row.waiting_at(token) >= 0) end_wait(shape, bytes.pages(), layer, row, token);
    }
    release_slots(parts_, bytes.pages(), layer, sequence, row.install(plan));
  }
}

}  // namespace kvswap
