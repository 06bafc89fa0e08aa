#include "engine/snapshot/snapshot_writer.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "engine/setting_names.h"
#include "engine/snapshot/saved_clusters.h"
#include "engine/snapshot/saved_retention.h"
#include "engine/snapshot/saved_reuse.h"
#include "engine/snapshot/tensor_names.h"
#include "io/error_text.h"
#include "io/secure_erase.h"
#include "io/syscalls.h"
#include "store/checksum.h"

namespace kvswap {
namespace {

constexpr uint32_t kNoNumber = std::numeric_limits<uint32_t>::max();

/// May what is held go on elsewhere, as a saved cache or a fork?
Status check_can_go_on(const EngineContext& context, const char* where) {
  const EngineOptions& options = context.options;
  if (context.plan.drops) {
    return Status::invalid(std::string(where) +
                           ": the session must have a directory, since without one what it drops "
                           "is gone; open the cache with a path");
  }
  if (context.retention.pages > 0 && context.retention.kind.scored_by == ScoredBy::kUser) {
    return Status::invalid(std::string(where) + ": retention.policy must not be '" +
                           file_word("keeper", options.keeper) +
                           "', since what scores its tokens is not saved; open the cache without "
                           "it");
  }
  return Status::ok();
}

}  // namespace

Status SnapshotWriter::begin(const char* where) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter());
  KVSWAP_RETURN_IF_ERROR(check_can_go_on(context_, where));
  KVSWAP_RETURN_IF_ERROR(steps_.drop_all());
  appender_.forget();
  return Status::ok();
}

Status SnapshotWriter::drain() {
  const int64_t positions = batch_.size() == 0 ? 0 : batch_.layer(0).positions;
  if (positions == 0) {
    return Status::invalid("save: the session must hold tokens, and is empty; prefill first");
  }
  for (int64_t layer = 0; layer < context_.options.layers; ++layer) {
    if (batch_.layer(layer).positions != positions) {
      return Status::invalid(
          "save: all layers must hold the same tokens, got " + std::to_string(positions) +
          " in layer 0 and " + std::to_string(batch_.layer(layer).positions) + " in layer " +
          std::to_string(layer) + "; end the forward pass, or crop() to the shortest");
    }
    KVSWAP_RETURN_IF_ERROR(sealer_.seal_overflow(layer));
    KVSWAP_RETURN_IF_ERROR(clustering_.catch_up(layer));
  }
  KVSWAP_RETURN_IF_ERROR(sealer_.drain());
  return context_.store->writes().flush();
}

SavedCounts SnapshotWriter::counts() const {
  return {.sequences = batch_.size(),
          .positions = batch_.layer(0).positions,
          .groups = batch_.layer(0).sealed_groups,
          .record_bytes = context_.stored_bytes(),
          .seed = context_.store->places().seed()};
}

bool SnapshotWriter::may_link() const {
  const RecordStore& store = *context_.store;
  const int64_t used = store.places().end_bytes() - context_.file->own_begin_bytes();
  // A file that is mostly holes would be larger than a copy, and slower to read.
  return store.bytes_held() > 0 && !context_.file->is_full() &&
         store.records().stand_from(store.places().first_place()) && 2 * store.bytes_held() >= used;
}

/// Makes the own file fit to be kept, and gives it to the target.
Result<bool> SnapshotWriter::link(SnapshotTarget& target) {
  if (!may_link()) return false;
  const int64_t begin = context_.file->own_begin_bytes();
  const int fd = context_.file->fd();
  // What was there once is nobody's business.
  if (context_.options.wipe_on_close) {
    int error = 0;
    context_.store->places().each_hole([&](int64_t offset, int64_t length) {
      if (error == 0) error = write_zeros(fd, offset - begin, length);
    });
    if (error == 0) error = -syscalls().fsync(fd);
    if (error != 0) {
      return Status::storage(
          "save: what was dropped must be overwritten (storage.wipe_on_close), got " +
              errno_text(error) + storage_hint(error),
          error, context_.options.directory);
    }
  }
  bool is_punched = true;
  context_.store->places().each_hole([&](int64_t offset, int64_t length) {
    constexpr int kMode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    is_punched = syscalls().fallocate(fd, kMode, offset - begin, length) == 0 && is_punched;
  });
  if (!is_punched) return false;
  KVSWAP_RETURN_IF_ERROR(context_.file->shrink(context_.store->places().end_bytes()));
  return target.link_records(context_.file->fd());
}

Status SnapshotWriter::copy(SnapshotTarget& target, uint64_t seed, Records& records,
                            std::vector<uint32_t>& numbers) {
  const int64_t sealed = batch_.layer(0).sealed_groups;
  if (sealed == 0) return Status::ok();
  auto blocks = past_.blocks();
  if (!blocks.is_ok()) return blocks.status();
  const std::shared_ptr<std::byte>& buffer = blocks.value().memory;
  const int64_t block = 2 * blocks.value().groups;
  for (int64_t layer = 0; layer < context_.options.layers; ++layer) {
    for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
      std::vector<int64_t> ids(sealed);
      std::iota(ids.begin(), ids.end(), 0);
      if (context_.clusters_of(layer) != nullptr) {
        const std::vector<int64_t> pages = cluster_page_ids(context_.clusters->of(layer, sequence));
        ids.insert(ids.end(), pages.begin(), pages.end());
      }
      std::erase_if(ids, [&](int64_t id) {
        return numbers[context_.store->tables().number(layer, sequence, id)] != kNoNumber;
      });
      for (int64_t first = 0; first < std::ssize(ids); first += block) {
        const auto some = std::span(ids).subspan(first, std::min(block, std::ssize(ids) - first));
        KVSWAP_RETURN_IF_ERROR(
            copy_records(target, seed, {layer, sequence, some}, buffer, records, numbers));
      }
    }
  }
  return Status::ok();
}

Status SnapshotWriter::copy_records(SnapshotTarget& target, uint64_t seed,
                                    const PrefixReader::Records& some,
                                    const std::shared_ptr<std::byte>& buffer, Records& records,
                                    std::vector<uint32_t>& numbers) {
  const int64_t stored_bytes = context_.stored_bytes();
  KVSWAP_RETURN_IF_ERROR(past_.load_stored(some, buffer.get(), buffer));
  for (int64_t i = 0; i < std::ssize(some.ids); ++i) {
    const int64_t id = some.ids[i];
    const auto number = static_cast<uint32_t>(records.sums.size());
    numbers[context_.store->tables().number(some.layer, some.sequence, id)] = number;
    const std::span bytes(buffer.get() + i * stored_bytes, stored_bytes);
    const uint32_t sum = record_checksum(bytes, {seed, some.layer, id, number + 1});
    records.sums.push_back({number, number + 1, sum});
    const size_t noted = records.notes.size();
    records.notes.resize(noted + context_.plan.note_bytes);
    context_.store->copy_note(some.layer, some.sequence, id, records.notes.data() + noted);
  }
  return target.write_records({buffer.get(), some.ids.size() * static_cast<size_t>(stored_bytes)});
}

Status SnapshotWriter::save(SnapshotTarget& target) {
  KVSWAP_RETURN_IF_ERROR(begin("save"));
  return calls_.leave(write(target));
}

Status SnapshotWriter::write(SnapshotTarget& target) {
  KVSWAP_RETURN_IF_ERROR(drain());
  SavedCounts saved = counts();
  auto linked = link(target);
  if (!linked.is_ok()) return linked.status();
  std::vector<uint32_t> numbers;
  Records records = {context_.store->records().held_records(numbers),
                     context_.store->records().held_notes()};
  std::shared_ptr<DataFile> next;
  if (linked.value()) {
    auto opened = context_.open_own_file();
    if (!opened.is_ok()) return opened.status();
    next = std::move(opened.value());
    const auto first =
        static_cast<uint32_t>(context_.file->own_begin_bytes() / context_.stored_bytes());
    for (SavedRecord& record : records.sums) record.place -= first;
  } else {
    std::fill(numbers.begin(), numbers.end(), kNoNumber);
    records = {};
    saved.seed = random_seed();
    KVSWAP_RETURN_IF_ERROR(copy(target, saved.seed, records, numbers));
  }
  saved.records = static_cast<int64_t>(records.sums.size());
  const auto retained = std::make_shared<const std::vector<uint32_t>>(std::move(numbers));
  KVSWAP_RETURN_IF_ERROR(target.finish(saved, list(std::move(records), retained, true)));
  if (linked.value()) {
    context_.file->keep();
    seal_file(std::move(next));
  }
  return Status::ok();
}

Result<SnapshotWriter::Shared> SnapshotWriter::share(SharedRows rows) {
  KVSWAP_RETURN_IF_ERROR(begin("fork"));
  KVSWAP_RETURN_IF_ERROR(drain());
  Shared shared;
  shared.counts = counts();
  const bool has_written = context_.store->places().end_bytes() > context_.file->own_begin_bytes();
  if (has_written) {
    if (context_.file->is_full()) {
      return Status::invalid("fork: a session must stand on at most " +
                             std::to_string(LayeredFile::kFilesMax) +
                             " files, one for each fork before it; save() it and open what was "
                             "saved");
    }
    auto next = context_.open_own_file();
    if (!next.is_ok()) return next.status();
    seal_file(std::move(next.value()));
  }
  auto base = std::make_shared<ParentFiles>();
  base->parts = context_.file->parts();
  base->parts.pop_back();
  base->seeds = context_.store->places().seeds();
  base->seeds.pop_back();
  base->end_bytes = context_.file->own_begin_bytes();
  base->record_bytes = context_.stored_bytes();
  base->groups = shared.counts.groups;
  std::vector<uint32_t> numbers;
  Records records = {context_.store->records().held_records(numbers),
                     context_.store->records().held_notes()};
  shared.counts.records = static_cast<int64_t>(records.sums.size());
  SummaryStore& summaries = context_.selector->summaries();
  const bool has_all = rows == SharedRows::kAll;
  if (has_all && summaries.is_shareable()) shared.summaries = &summaries;
  const bool lists_them =
      shared.summaries == nullptr && (has_all || !context_.plan.rows.takes_projections);
  shared.tensors =
      list(std::move(records), std::make_shared<const std::vector<uint32_t>>(std::move(numbers)),
           lists_them);
  shared.base = std::move(base);
  return shared;
}

Status SnapshotWriter::verify_clusters(int64_t layer) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter(layer));
  return kvswap::verify_clusters(context_, batch_, past_, layer);
}

/// From now on records go to `next`.
void SnapshotWriter::seal_file(std::shared_ptr<DataFile> next) {
  const int64_t begin =
      LayeredFile::begin_above(context_.store->places().end_bytes(), context_.stored_bytes());
  context_.file->seal(std::move(next), begin);
  context_.store->places().begin_file(begin, random_seed());
}

std::vector<SavedTensor> SnapshotWriter::list(Records records, const Numbers& numbers,
                                              bool has_summaries) {
  std::vector<SavedTensor> tensors;
  const int64_t positions = batch_.layer(0).positions;
  const int64_t apart = context_.options.heads_apart;
  const auto list_bits = [&](const char* name, bool (PaddingMask::*bit)(int64_t) const) {
    tensors.push_back({name,
                       "BOOL",
                       {batch_.size() / apart, positions},
                       positions,
                       [=, this](int64_t first, int64_t count, std::byte* target) {
                         for (int64_t i = 0; i < count * positions; ++i) {
                           const int64_t sequence = (first + i / positions) * apart;
                           const bool is_set = (batch_.validity(sequence).*bit)(i % positions);
                           target[i] = std::byte{is_set};
                         }
                         return Status::ok();
                       }});
  };
  list_bits("validity", &PaddingMask::is_valid);
  bool has_later_padding = false;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    has_later_padding |= !batch_.validity(sequence).later_padding().empty();
  }
  // Where it is not the same: sinks are the first tokens that came valid.
  if (has_later_padding) list_bits("came_valid", &PaddingMask::came_valid);
  list_records(std::move(records), tensors);
  for (int64_t layer = 0; layer < context_.options.layers; ++layer) {
    list_layer(layer, numbers, tensors);
    list_sinks(layer, tensors);
    list_retained(context_, batch_, layer, tensors);
    list_clusters(context_, batch_, layer, numbers, tensors);
    context_.selector->list_projections(layer, tensors);
    if (has_summaries) context_.selector->summaries().list(layer, tensors);
  }
  list_reuse(context_, batch_, steps_, tensors);
  return tensors;
}

void SnapshotWriter::list_records(Records records, std::vector<SavedTensor>& tensors) const {
  if (records.sums.empty()) return;
  const auto count = static_cast<int64_t>(records.sums.size());
  const auto held = std::make_shared<const Records>(std::move(records));
  tensors.push_back({"records",
                     "U32",
                     {count, 3},
                     sizeof(SavedRecord),
                     [held](int64_t first, int64_t rows, std::byte* target) {
                       std::memcpy(target, held->sums.data() + first, rows * sizeof(SavedRecord));
                       return Status::ok();
                     }});
  const int64_t bytes = context_.plan.note_bytes;
  if (bytes == 0) return;
  tensors.push_back({"exponents",
                     "I8",
                     {count, context_.options.kv_heads, 2},
                     bytes,
                     [held, bytes](int64_t first, int64_t rows, std::byte* target) {
                       std::memcpy(target, held->notes.data() + first * bytes, rows * bytes);
                       return Status::ok();
                     }});
}

void SnapshotWriter::list_layer(int64_t layer, const Numbers& numbers,
                                std::vector<SavedTensor>& tensors) {
  const EngineOptions& options = context_.options;
  const int64_t groups = batch_.layer(layer).sealed_groups;
  const int64_t positions = batch_.layer(layer).positions;
  if (groups > 0) {
    const int64_t row_bytes = groups * int64_t{sizeof(uint32_t)};
    tensors.push_back(
        {saved_name(layer, "table"),
         "U32",
         {batch_.size(), groups},
         row_bytes,
         [this, layer, groups, numbers](int64_t first, int64_t count, std::byte* target) {
           for (int64_t i = 0; i < count * groups; ++i) {
             const uint32_t number =
                 (*numbers)[context_.store->tables().number(layer, first + i / groups, i % groups)];
             std::memcpy(target + i * sizeof(number), &number, sizeof(number));
           }
           return Status::ok();
         }});
  }
  const int64_t begin = groups * options.group_tokens;
  const int64_t newest = positions - begin;
  if (newest == 0) return;
  RecordShape tail = context_.plan.record_shape;
  tail.group_tokens = newest;
  const int64_t bytes = tail.payload_bytes();
  const int64_t key_bytes = tail.kv_heads * tail.side_elements(0) * tail.element_bytes;
  const bool has_values = tail.sides == 2;
  tensors.push_back(
      {saved_name(layer, "tail"), saved_dtype(options.dtype), saved_tail_sizes(tail, batch_.size()),
       bytes, [=, this](int64_t first, int64_t count, std::byte* target) {
         for (int64_t i = 0; i < count; ++i, target += bytes) {
           KVSWAP_RETURN_IF_ERROR(past_.read({layer, first + i, begin, positions}, target,
                                             has_values ? target + key_bytes : nullptr));
         }
         return Status::ok();
       }});
}

void SnapshotWriter::list_sinks(int64_t layer, std::vector<SavedTensor>& tensors) {
  const EngineOptions& options = context_.options;
  struct Sink {
    uint32_t sequence;
    uint32_t group;
    const std::byte* page;
  };
  std::vector<Sink> sinks;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    SequencePages& pages = batch_.pages(sequence);
    int64_t index = 0;
    for (const int32_t group : pages.sinks(layer)) {
      sinks.push_back({static_cast<uint32_t>(sequence), static_cast<uint32_t>(group),
                       pages.sink_page(layer, index++)});
    }
  }
  if (sinks.empty()) return;
  const auto count = static_cast<int64_t>(sinks.size());
  constexpr int64_t kRowBytes = 2 * sizeof(uint32_t);
  tensors.push_back({saved_name(layer, "sinks"),
                     "U32",
                     {count, 2},
                     kRowBytes,
                     [sinks](int64_t first, int64_t rows, std::byte* target) {
                       for (int64_t i = 0; i < rows; ++i) {
                         std::memcpy(target + i * kRowBytes, &sinks[first + i], kRowBytes);
                       }
                       return Status::ok();
                     }});
  const int64_t bytes = context_.plan.group_bytes;
  tensors.push_back({saved_name(layer, "sink_records"), saved_dtype(options.dtype),
                     saved_page_sizes(context_.plan.record_shape, count), bytes,
                     [this, sinks, bytes](int64_t first, int64_t rows, std::byte* target) {
                       for (int64_t i = 0; i < rows; ++i) {
                         KVSWAP_RETURN_IF_ERROR(context_.space->compute().download(
                             target + i * bytes, sinks[first + i].page, bytes));
                       }
                       return Status::ok();
                     }});
}

}  // namespace kvswap
