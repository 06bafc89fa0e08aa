#include "engine/engine_options.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <utility>

#include "engine/audit.h"
#include "engine/check_settings.h"
#include "engine/device_space.h"
#include "engine/fetcher.h"
#include "engine/keeping.h"
#include "engine/page_scores.h"
#include "io/timeline.h"
#include "kernels/paged_attention.h"
#include "memory/page_map.h"
#include "methods/hosted_selector.h"
#include "methods/mass_scorer.h"
#include "methods/rows.h"
#include "store/record_store.h"

namespace kvswap {

namespace {

Status out_of_range(const char* name, int64_t low, int64_t high, int64_t value) {
  return Status::invalid("session: " + std::string(name) + " must be " + std::to_string(low) +
                         ".." + std::to_string(high) + ", got " + std::to_string(value));
}

/// What overflows is this, which no budget and no disk holds; sums of some of it do not overflow.
constexpr int64_t kTooManyBytes = std::numeric_limits<int64_t>::max() / 64;

/// Of sizes that users choose.
int64_t product(std::initializer_list<int64_t> factors) {
  int64_t result = 1;
  for (const int64_t factor : factors) {
    if (__builtin_mul_overflow(result, factor, &result)) return kTooManyBytes;
  }
  return std::min(result, kTooManyBytes);
}

/// That layers have something to look at, and somebody who looks.
Status check_looks(const EngineOptions& options) {
  const int64_t every = options.steps_between_looks();
  if (every == 0) return Status::ok();
  const std::string got = ", got one that looks every " + std::to_string(every) + " steps";
  if (options.device) {
    return Status::invalid("session: audit_every must be 0 on a device, and missed_mass_max null" +
                           got + "; groups are audited on the CPU only");
  }
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    if (!options.is_exact(layer)) return Status::ok();
  }
  return Status::invalid(
      "session: audit_every must be 0 where exact_layers has every layer, and missed_mass_max "
      "null, since nothing is selected that could be missed" +
      got);
}

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

Status EngineOptions::validate() const {
  struct Range {
    const char* name;
    int64_t low, high, value;
  };
  const int64_t width = (heads == "each" ? 1 : kv_heads) * head_dim;
  const Range ranges[] = {
      {"layers", 1, 4096, layers},
      {"kv_heads", 1, 1024, kv_heads},
      {"query_heads", 1, 4096, query_heads},
      {"head_dim", 1, 1024, head_dim},
      {"timeline_spans", 0, 1 << 24, timeline_spans},
      {"max_context", -1, kContextMax, max_context},
      {"max_batch", -1, kBatchMax, max_batch},
  };
  const Status checked = check_settings(*this);
  if (!checked.is_ok()) return Status::invalid("session: " + checked.message());
  // A word that the table has and this build does not know.
  if (!parse_replacement(replacement) || !parse_io_mode(io_mode) || !parse_reader_kind(reader) ||
      (device_model && !find_device_model(*device_model))) {
    return Status::invalid(
        "session: replacement, io_mode, reader and device_model must be known, "
        "got " +
        replacement + ", " + io_mode + ", " + reader + " and " + device_model.value_or("none"));
  }
  for (const Range& range : ranges) {
    if (range.value < range.low || range.value > range.high) {
      return out_of_range(range.name, range.low, range.high, range.value);
    }
  }
  if (dtype == DType::kInt8) {
    return Status::invalid("session: dtype must be float32, bfloat16 or float16, got int8");
  }
  if (query_heads % kv_heads != 0) {
    return Status::invalid("session: query_heads must be a multiple of kv_heads, got " +
                           std::to_string(query_heads) + " and " + std::to_string(kv_heads));
  }
  if (device && has_float8_records()) {
    return Status::invalid(
        "session: records must be 'model' where pages are a device's, got 'fp8', which the CPU "
        "alone reads; leave records out, or keep the cache in host memory");
  }
  if (device && keeper != "none") {
    return Status::invalid("session: keeper must be 'none' where pages are a device's, got '" +
                           keeper + "', which the CPU alone has; keep the cache in host memory");
  }
  if (device && replacement == "score") {
    return Status::invalid(
        "session: replacement must not be 'score' where pages are a device's, since the CPU alone "
        "finds out what they were paid; take lru, or keep the cache in host memory");
  }
  KVSWAP_RETURN_IF_ERROR(check_method(method()));
  if (RowsKind::find(rows)->takes_projections && static_cast<int64_t>(ranks.size()) != layers) {
    return Status::invalid("session: ranks must have one number per layer (" +
                           std::to_string(layers) + "), got " + std::to_string(ranks.size()));
  }
  for (const int64_t rank : ranks) {
    if (rank < 1 || rank > width) return out_of_range("rank", 1, width, rank);
  }
  KVSWAP_RETURN_IF_ERROR(check_looks(*this));
  // What a kernel chooses at once (kernels/cuda/kernels.h).
  if (device && groups_max > cuda::kTopKMax) {
    return out_of_range("groups_max", 1, cuda::kTopKMax, groups_max);
  }
  return Status::ok();
}

Status EngineOptions::check_place() const {
  if (!directory.empty()) return Status::ok();
  const std::string end = "; name a folder on a disk";
  if (!drops()) {
    return Status::invalid("session: directory must be given where every token is kept (rows=" +
                           rows + ", keeper=" + keeper + "), got none" + end +
                           ", or take what drops tokens: rows=none and a keeper");
  }
  if (!exact_layers.empty()) {
    return Status::invalid(
        "session: exact_layers must be empty without a directory, since they attend everything, "
        "got some" +
        end);
  }
  if (weighs_disk()) {
    return Status::invalid(
        "session: keep_scores must be attended without a directory, since what is dropped cannot "
        "be read again, got disk" +
        end);
  }
  const Settings usual;
  const std::pair<const char*, bool> of_a_disk[] = {
      {"device_model", device_model == usual.device_model},
      {"disk_quota_bytes", disk_quota_bytes == usual.disk_quota_bytes},
  };
  for (const auto& [name, is_usual] : of_a_disk) {
    if (is_usual) continue;
    return Status::invalid("session: " + std::string(name) +
                           " must be left out without a directory, since there is no disk, got "
                           "a value" +
                           end);
  }
  if (base == nullptr) return Status::ok();
  return Status::invalid("session: directory must be given to continue what was saved, got none" +
                         end);
}

EngineOptions EngineOptions::apart() const {
  EngineOptions options = *this;
  if (heads != "each" || heads_apart > 1) return options;
  options.heads_apart = kv_heads;
  options.query_heads = query_heads / kv_heads;
  options.kv_heads = 1;
  if (max_batch > 0) options.max_batch = product({max_batch, kv_heads});
  return options;
}

int64_t EngineOptions::group_tokens_min(int64_t alignment_bytes) const {
  const int64_t token_bytes = payload_bytes() / group_tokens;
  return ((alignment_bytes + 1) / 2 + token_bytes - 1) / token_bytes;
}

DataFileOptions EngineOptions::file_options() const {
  return {.directory = directory,
          .mode = *parse_io_mode(io_mode),
          .quota_bytes = disk_quota_bytes.value_or(-1),
          .extend_bytes = file_extend_bytes,
          .is_wiped = wipe_on_close};
}

ReaderOptions EngineOptions::reader_options() const {
  return {.kind = *parse_reader_kind(reader), .depth = static_cast<int>(read_depth)};
}

MethodOptions EngineOptions::method() const {
  return {.rows = rows,
          .layers = layers,
          .heads = query_heads,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .heads_apart = heads_apart,
          .group_tokens = group_tokens,
          .ranks = ranks,
          .exact_layers = exact_layers,
          .summary_dtype = summary_type(),
          .score = score_kind()};
}

bool EngineOptions::is_exact(int64_t layer) const { return kvswap::is_exact(*this, layer); }

RecordShape EngineOptions::record_shape() const {
  return {heads == "each" ? 1 : kv_heads, group_tokens, head_dim, dtype_bytes(dtype)};
}

int64_t EngineOptions::payload_bytes() const {
  return has_float8_records() ? group_bytes() / dtype_bytes(dtype) : group_bytes();
}

int64_t EngineOptions::token_page_bytes(int64_t record_bytes) const {
  return has_float8_records() ? round_up(group_bytes(), 64) : record_bytes;
}

int64_t EngineOptions::table_bytes_per_group() const {
  return RecordStore::table_bytes_per_group() + note_bytes() + Keeping::bytes_per_group(*this);
}

int64_t EngineOptions::score_bytes(int64_t batch, int64_t groups) const {
  const int64_t kept = Keeping::turn_bytes(*this, std::min(groups, kContextMax));
  if (!selects() || (device && has_device_kernels(method()))) return kept;
  // What is given stands beside what is chosen from: of a layer, and of the one predicted next.
  const int64_t copies = RowsKind::find(rows)->is_given ? 3 : 1;
  const int64_t scores =
      kept + product({batch, select_queries_max, groups, copies, int64_t{sizeof(float)}});
  if (groups == 0) return scores;
  const int64_t asked_heads = score_kind() == Score::kMax ? query_heads : 1;
  if (!RowsKind::find(rows)->takes_projections) {
    const int64_t width = RowsKind::find(rows)->shape(method(), 0).width;
    return scores +
           product({batch, select_queries_max, asked_heads, width, int64_t{sizeof(float)}});
  }
  if (score_kind() == Score::kSum) return scores;
  const int64_t rank = *std::max_element(ranks.begin(), ranks.end());
  const int64_t projected =
      product({batch, select_queries_max, query_heads, rank, int64_t{sizeof(float)}});
  if (score_kind() == Score::kMax) return scores + projected;
  return scores + projected +
         MassScorer::scratch_bytes(query_heads, rank, std::min(groups, kContextMax), group_tokens);
}

int64_t EngineOptions::sink_pages() const {
  return sink_tokens == 0 ? 0 : (sink_tokens + group_tokens - 2) / group_tokens + 1;
}

bool EngineOptions::keeps_tokens(int64_t layer) const {
  return keeper_kind().keeps_tokens && !is_exact(layer);
}

int64_t EngineOptions::kept_pages() const {
  if (!keeper_kind().keeps_tokens) return 0;
  // Of each precision the last page may be partly empty.
  return (keep_tokens + group_tokens - 1) / group_tokens + (keeps_float8() ? 1 : 0);
}

bool EngineOptions::keeps_float8() const { return keeper_kind().joins && keep_ratio != 1.0; }

int64_t EngineOptions::tail_pages() const {
  const int64_t step = group_tokens - 1 + select_queries_max;
  // What a step seals stands there until it has joined.
  const int64_t sealed = keeper_kind().joins ? step / group_tokens : 0;
  return (tail_tokens + step + group_tokens - 1) / group_tokens + 1 + sealed;
}

int64_t EngineOptions::sealed_groups(int64_t columns) const {
  return std::max<int64_t>(0, columns - tail_tokens) / group_tokens;
}

int64_t EngineOptions::write_buffer_bytes(int64_t record_bytes) const {
  // A small budget must not be eaten by staging; a large one gains nothing beyond 1 MiB.
  const int64_t wanted =
      kv_memory_bytes < 0 ? 1 << 20 : std::clamp<int64_t>(kv_memory_bytes / 96, 64 << 10, 1 << 20);
  return round_up(std::max(wanted / record_bytes, int64_t{1}) * record_bytes, 4096);
}

int64_t EngineOptions::write_buffers() const { return drops() ? 1 : kWriteBuffers; }

int64_t EngineOptions::records_held(int64_t batch, int64_t context) const {
  if (!drops()) return 0;
  const int64_t sealed = sealed_groups(std::min(context, kContextMax));
  // Of a layer the whole prompt; of the others what a crop may ask for, and the next turn.
  const int64_t waiting = (columns_to_crop() + keep_interval) / group_tokens + 2;
  return product({batch, sealed + product({layers, std::min(sealed, waiting)})});
}

int64_t EngineOptions::past_block_groups(int64_t record_bytes) const {
  return std::max<int64_t>(1, write_buffer_bytes(record_bytes) / record_bytes);
}

int64_t EngineOptions::encoded_at_once(int64_t record_bytes) const {
  if (!has_float8_records()) return 0;
  return std::max<int64_t>(1, write_buffer_bytes(record_bytes) / token_page_bytes(record_bytes));
}

MemoryNeed memory_need(const EngineOptions& options, int64_t record_bytes, int64_t batch,
                       int64_t context) {
  batch = std::min(batch, kTooManyBytes);
  context = std::min(context, kTooManyBytes);
  const EngineOptions inner = options.apart();
  if (inner.heads_apart != options.heads_apart) {
    return memory_need(inner, record_bytes, product({batch, inner.heads_apart}), context);
  }
  const int64_t groups = (context + options.group_tokens - 1) / options.group_tokens;
  const int64_t width = options.heads_apart * options.kv_heads * options.head_dim;
  const int64_t partitions = product({options.layers, batch});
  MemoryNeed need;
  const int64_t token_page_bytes = options.token_page_bytes(record_bytes);
  need.pages = product({partitions, options.pages_max, record_bytes}) +
               product({partitions, options.sink_pages() + options.tail_pages(), token_page_bytes});
  need.kept = product({partitions, Keeping::bytes_per_layer(options, token_page_bytes)});
  const int64_t summarised =
      options.sealed_groups(std::min(context, kContextMax)) * options.group_tokens;
  const MethodOptions method = options.method();
  const RowsKind& kind = *RowsKind::find(options.rows);
  int64_t moving = 0;
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    const RowShape rows = kind.shape(method, layer);
    if (options.is_exact(layer) || rows.width == 0) continue;
    const Summary::Shape shape = {rows.width, chunk_rows(options.group_tokens, rows.tokens_per_row),
                                  options.summary_type()};
    const int64_t bytes = product({batch, shape.bytes(summarised / rows.tokens_per_row)});
    need.summary = std::min(need.summary + bytes, kTooManyBytes);
    moving = std::max(moving, shape.moving_bytes());
    if (kind.takes_projections) need.projections += 2 * width * rows.width * int64_t{sizeof(float)};
  }
  need.tables = product({partitions, groups, options.table_bytes_per_group()}) +
                product({partitions, options.pages_max,
                         PageMap::bytes_per_page() + Fetch::bytes_per_load()}) +
                product({batch, (context + 63) / 64, 8});
  // Blocks of the past, and what they are unpacked to.
  const int64_t block = options.past_block_groups(record_bytes);
  need.staging = options.write_buffers() * options.write_buffer_bytes(record_bytes) +
                 product({options.records_held(batch, context), record_bytes}) +
                 options.gap_bytes() + 2 * block * record_bytes + 2 * block * token_page_bytes +
                 options.encoded_at_once(record_bytes) * token_page_bytes + moving +
                 Audit::fixed_bytes(options, record_bytes) +
                 Keeping::fixed_bytes(options, record_bytes);
  // crop() into sealed groups reads all layers before it changes one; see Editor::make_room().
  const bool lends = !options.device && options.pages_max >= options.tail_pages();
  const int64_t crop_layers = lends ? 1 : options.layers;
  need.scratch = options.score_bytes(batch, groups) +
                 product({batch, options.pages_per_layer(), 20 + options.page_note_bytes()}) +
                 product({batch, Audit::sequence_bytes(options)}) +
                 product({batch, Keeping::sequence_bytes(options)}) +
                 product({batch, PageScores::sequence_bytes(options)}) +
                 product({crop_layers, batch, options.tail_pages(), record_bytes});
  need.timeline = Timeline::bytes(options.timeline_spans);
  // What a device needs beside is a small part of such sizes, and would not change the answer.
  if (options.device && need.total() < kTooManyBytes) {
    const DeviceNeed beside =
        device_need(options, record_bytes, batch, round_up(groups, groups_unit(options)));
    need.device = beside.device;
    need.pinned = beside.pinned;
    if (!has_device_kernels(method)) {
      need.staging += HostedSelector::key_bytes(method);
      need.scratch += batch * HostedSelector::query_bytes(method, options.select_queries_max);
    }
  }
  return need;
}

}  // namespace kvswap
