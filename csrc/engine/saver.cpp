#include "engine/saver.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "engine/saved_clusters.h"
#include "engine/saved_kept.h"
#include "engine/saved_names.h"
#include "engine/saved_reuse.h"
#include "io/error_text.h"
#include "io/kernel.h"
#include "io/wiping.h"
#include "store/checksum.h"

namespace kvswap {
namespace {

constexpr uint32_t kNoNumber = std::numeric_limits<uint32_t>::max();

/// May what is held go on elsewhere, as a saved cache or a fork?
Status check_can_go_on(const EngineParts& parts, const char* where) {
  const EngineOptions& options = parts.options;
  if (parts.plan.drops) {
    return Status::invalid(std::string(where) +
                           ": the session must have a directory, since without one what it drops "
                           "is gone; open the cache with a path");
  }
  if (parts.keep.pages > 0 && parts.keep.kind.is_given) {
    return Status::invalid(std::string(where) + ": keeper must not be '" + options.keeper +
                           "', since what scores its tokens is not saved; open the cache without "
                           "it");
  }
  return Status::ok();
}

}  // namespace

Status Saver::begin(const char* where) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter());
  KVSWAP_RETURN_IF_ERROR(check_can_go_on(parts_, where));
  KVSWAP_RETURN_IF_ERROR(steps_.drop_all());
  appender_.forget();
  return Status::ok();
}

Status Saver::settle() {
  const int64_t positions = batch_.size() == 0 ? 0 : batch_.layer(0).positions;
  if (positions == 0) {
    return Status::invalid("save: the session must hold tokens, and is empty; prefill first");
  }
  for (int64_t layer = 0; layer < parts_.options.layers; ++layer) {
    if (batch_.layer(layer).positions != positions) {
      return Status::invalid(
          "save: all layers must hold the same tokens, got " + std::to_string(positions) +
          " in layer 0 and " + std::to_string(batch_.layer(layer).positions) + " in layer " +
          std::to_string(layer) + "; end the forward pass, or crop() to the shortest");
    }
    KVSWAP_RETURN_IF_ERROR(sealer_.seal_overflow(layer));
    KVSWAP_RETURN_IF_ERROR(clustering_.catch_up(layer));
  }
  KVSWAP_RETURN_IF_ERROR(sealer_.settle());
  return parts_.store->writes().flush();
}

SavedCounts Saver::counts() const {
  return {.sequences = batch_.size(),
          .positions = batch_.layer(0).positions,
          .groups = batch_.layer(0).sealed_groups,
          .record_bytes = parts_.record_bytes(),
          .seed = parts_.store->places().seed()};
}

bool Saver::may_link() const {
  const RecordStore& store = *parts_.store;
  const int64_t used = store.places().end_bytes() - parts_.file->own_begin_bytes();
  // A file that is mostly holes would be larger than a copy, and slower to read.
  return store.bytes_held() > 0 && !parts_.file->is_full() &&
         store.records().stand_from(store.places().first_place()) && 2 * store.bytes_held() >= used;
}

/// Makes the own file fit to be kept, and gives it to the target.
Result<bool> Saver::link(SaveTarget& target) {
  if (!may_link()) return false;
  const int64_t begin = parts_.file->own_begin_bytes();
  const int fd = parts_.file->fd();
  // What was there once is nobody's business.
  if (parts_.options.wipe_on_close) {
    int error = 0;
    parts_.store->places().each_hole([&](int64_t offset, int64_t length) {
      if (error == 0) error = write_zeros(fd, offset - begin, length);
    });
    if (error == 0) error = -kernel().fsync(fd);
    if (error != 0) {
      return Status::storage("save: what was dropped must be overwritten (wipe_on_close), got " +
                                 errno_text(error) + storage_hint(error),
                             error, parts_.options.directory);
    }
  }
  bool is_punched = true;
  parts_.store->places().each_hole([&](int64_t offset, int64_t length) {
    constexpr int kMode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    is_punched = kernel().fallocate(fd, kMode, offset - begin, length) == 0 && is_punched;
  });
  if (!is_punched) return false;
  KVSWAP_RETURN_IF_ERROR(parts_.file->shrink(parts_.store->places().end_bytes()));
  return target.link_records(parts_.file->fd());
}

Status Saver::copy(SaveTarget& target, uint64_t seed, Records& records,
                   std::vector<uint32_t>& numbers) {
  const int64_t sealed = batch_.layer(0).sealed_groups;
  const int64_t record_bytes = parts_.record_bytes();
  const int64_t block = std::min(parts_.plan.past_block_groups, sealed);
  if (block == 0) return Status::ok();
  auto buffer = share_aligned_bytes(block * record_bytes, parts_.options.memory_at_end());
  if (!buffer.is_ok()) return buffer.status();
  for (int64_t layer = 0; layer < parts_.options.layers; ++layer) {
    for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
      std::vector<int64_t> ids(sealed);
      std::iota(ids.begin(), ids.end(), 0);
      if (parts_.clusters_of(layer) != nullptr) {
        const std::vector<int64_t> pages = cluster_page_ids(parts_.clusters->of(layer, sequence));
        ids.insert(ids.end(), pages.begin(), pages.end());
      }
      std::erase_if(ids, [&](int64_t id) {
        return numbers[parts_.store->tables().number(layer, sequence, id)] != kNoNumber;
      });
      for (int64_t first = 0; first < std::ssize(ids); first += block) {
        const auto some = std::span(ids).subspan(first, std::min(block, std::ssize(ids) - first));
        KVSWAP_RETURN_IF_ERROR(
            copy_records(target, seed, {layer, sequence, some}, buffer.value(), records, numbers));
      }
    }
  }
  return Status::ok();
}

Status Saver::copy_records(SaveTarget& target, uint64_t seed, const PastReader::Records& some,
                           const std::shared_ptr<std::byte>& buffer, Records& records,
                           std::vector<uint32_t>& numbers) {
  const int64_t record_bytes = parts_.record_bytes();
  KVSWAP_RETURN_IF_ERROR(past_.load(some, buffer.get(), buffer));
  for (int64_t i = 0; i < std::ssize(some.ids); ++i) {
    const int64_t id = some.ids[i];
    const auto number = static_cast<uint32_t>(records.sums.size());
    numbers[parts_.store->tables().number(some.layer, some.sequence, id)] = number;
    const std::span bytes(buffer.get() + i * record_bytes, record_bytes);
    const uint32_t sum = record_checksum(bytes, {seed, some.layer, id, number + 1});
    records.sums.push_back({number, number + 1, sum});
    const size_t noted = records.notes.size();
    records.notes.resize(noted + parts_.plan.note_bytes);
    parts_.store->copy_note(some.layer, some.sequence, id, records.notes.data() + noted);
  }
  return target.write_records({buffer.get(), some.ids.size() * static_cast<size_t>(record_bytes)});
}

Status Saver::save(SaveTarget& target) {
  KVSWAP_RETURN_IF_ERROR(begin("save"));
  return calls_.leave(write(target));
}

Status Saver::write(SaveTarget& target) {
  KVSWAP_RETURN_IF_ERROR(settle());
  SavedCounts saved = counts();
  auto linked = link(target);
  if (!linked.is_ok()) return linked.status();
  std::vector<uint32_t> numbers;
  Records records = {parts_.store->records().held_records(numbers),
                     parts_.store->records().held_notes()};
  std::shared_ptr<DataFile> next;
  if (linked.value()) {
    auto opened = parts_.open_own_file();
    if (!opened.is_ok()) return opened.status();
    next = std::move(opened.value());
    const auto first =
        static_cast<uint32_t>(parts_.file->own_begin_bytes() / parts_.record_bytes());
    for (SavedRecord& record : records.sums) record.place -= first;
  } else {
    std::fill(numbers.begin(), numbers.end(), kNoNumber);
    records = {};
    saved.seed = random_seed();
    KVSWAP_RETURN_IF_ERROR(copy(target, saved.seed, records, numbers));
  }
  saved.records = static_cast<int64_t>(records.sums.size());
  const auto kept = std::make_shared<const std::vector<uint32_t>>(std::move(numbers));
  KVSWAP_RETURN_IF_ERROR(target.finish(saved, list(std::move(records), kept, true)));
  if (linked.value()) {
    parts_.file->keep();
    seal_file(std::move(next));
  }
  return Status::ok();
}

Result<Saver::Shared> Saver::share() {
  KVSWAP_RETURN_IF_ERROR(begin("fork"));
  KVSWAP_RETURN_IF_ERROR(settle());
  Shared shared;
  shared.counts = counts();
  const bool has_written = parts_.store->places().end_bytes() > parts_.file->own_begin_bytes();
  if (has_written) {
    if (parts_.file->is_full()) {
      return Status::invalid("fork: a session must stand on at most " +
                             std::to_string(FileStack::kFilesMax) +
                             " files, one for each fork before it; save() it and open what was "
                             "saved");
    }
    auto next = parts_.open_own_file();
    if (!next.is_ok()) return next.status();
    seal_file(std::move(next.value()));
  }
  auto base = std::make_shared<BaseFiles>();
  base->parts = parts_.file->parts();
  base->parts.pop_back();
  base->seeds = parts_.store->places().seeds();
  base->seeds.pop_back();
  base->end_bytes = parts_.file->own_begin_bytes();
  base->record_bytes = parts_.record_bytes();
  base->groups = shared.counts.groups;
  std::vector<uint32_t> numbers;
  Records records = {parts_.store->records().held_records(numbers),
                     parts_.store->records().held_notes()};
  shared.counts.records = static_cast<int64_t>(records.sums.size());
  Summaries& summaries = parts_.selector->summaries();
  if (summaries.is_shareable()) shared.summaries = &summaries;
  shared.tensors =
      list(std::move(records), std::make_shared<const std::vector<uint32_t>>(std::move(numbers)),
           shared.summaries == nullptr);
  shared.base = std::move(base);
  return shared;
}

Status Saver::verify_clusters(int64_t layer) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter(layer));
  return kvswap::verify_clusters(parts_, batch_, past_, layer);
}

/// From now on records go to `next`.
void Saver::seal_file(std::shared_ptr<DataFile> next) {
  const int64_t begin =
      FileStack::begin_above(parts_.store->places().end_bytes(), parts_.record_bytes());
  parts_.file->seal(std::move(next), begin);
  parts_.store->places().begin_file(begin, random_seed());
}

std::vector<SavedTensor> Saver::list(Records records, const Numbers& numbers, bool has_summaries) {
  std::vector<SavedTensor> tensors;
  const int64_t positions = batch_.layer(0).positions;
  const int64_t apart = parts_.options.heads_apart;
  const auto list_bits = [&](const char* name, bool (TokenValidity::*bit)(int64_t) const) {
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
  list_bits("validity", &TokenValidity::is_valid);
  bool has_later_padding = false;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    has_later_padding |= !batch_.validity(sequence).later_padding().empty();
  }
  // Where it is not the same: sinks are the first tokens that came valid.
  if (has_later_padding) list_bits("came_valid", &TokenValidity::came_valid);
  list_records(std::move(records), tensors);
  for (int64_t layer = 0; layer < parts_.options.layers; ++layer) {
    list_layer(layer, numbers, tensors);
    list_sinks(layer, tensors);
    list_kept(parts_, batch_, layer, tensors);
    list_clusters(parts_, batch_, layer, numbers, tensors);
    parts_.selector->list_projections(layer, tensors);
    if (has_summaries) parts_.selector->summaries().list(layer, tensors);
  }
  list_reuse(parts_, batch_, steps_, tensors);
  return tensors;
}

void Saver::list_records(Records records, std::vector<SavedTensor>& tensors) const {
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
  const int64_t bytes = parts_.plan.note_bytes;
  if (bytes == 0) return;
  tensors.push_back({"exponents",
                     "I8",
                     {count, parts_.options.kv_heads, 2},
                     bytes,
                     [held, bytes](int64_t first, int64_t rows, std::byte* target) {
                       std::memcpy(target, held->notes.data() + first * bytes, rows * bytes);
                       return Status::ok();
                     }});
}

void Saver::list_layer(int64_t layer, const Numbers& numbers, std::vector<SavedTensor>& tensors) {
  const EngineOptions& options = parts_.options;
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
                 (*numbers)[parts_.store->tables().number(layer, first + i / groups, i % groups)];
             std::memcpy(target + i * sizeof(number), &number, sizeof(number));
           }
           return Status::ok();
         }});
  }
  const int64_t begin = groups * options.group_tokens;
  const int64_t newest = positions - begin;
  if (newest == 0) return;
  const int64_t side = options.kv_heads * newest * options.head_dim * dtype_bytes(options.dtype);
  const int64_t sides = options.sides;
  tensors.push_back({saved_name(layer, "tail"),
                     saved_dtype(options.dtype),
                     {batch_.size(), sides, options.kv_heads, newest, options.head_dim},
                     sides * side,
                     [=, this](int64_t first, int64_t count, std::byte* target) {
                       for (int64_t i = 0; i < count; ++i, target += sides * side) {
                         KVSWAP_RETURN_IF_ERROR(past_.read({layer, first + i, begin, positions},
                                                           target,
                                                           sides == 2 ? target + side : nullptr));
                       }
                       return Status::ok();
                     }});
}

void Saver::list_sinks(int64_t layer, std::vector<SavedTensor>& tensors) {
  const EngineOptions& options = parts_.options;
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
  const int64_t bytes = parts_.plan.group_bytes;
  tensors.push_back(
      {saved_name(layer, "sink_records"),
       saved_dtype(options.dtype),
       {count, options.kv_heads, options.sides, options.group_tokens, options.head_dim},
       bytes,
       [this, sinks, bytes](int64_t first, int64_t rows, std::byte* target) {
         for (int64_t i = 0; i < rows; ++i) {
           KVSWAP_RETURN_IF_ERROR(
               parts_.space->compute().download(target + i * bytes, sinks[first + i].page, bytes));
         }
         return Status::ok();
       }});
}

}  // namespace kvswap
