#include "torch/session.h"

#include <ATen/ATen.h>

#include <string>

#include "runtime/engine.h"
#include "runtime/engine_report.h"
#include "torch/engine_calls.h"
#include "torch/parallel.h"
#include "torch/session_error.h"

namespace kvswap {

void throw_if_error(const Status& status) {
  using Kind = SessionError::Kind;
  switch (status.code()) {
    case StatusCode::kOk:
      return;
    case StatusCode::kInvalid:
      // A path that is not there is the caller's mistake and the world's: OSError says which.
      if (status.error_number() != 0) {
        throw SessionError(Kind::kStorage, status.message(), status.error_number());
      }
      TORCH_CHECK_VALUE(false, status.message());
    case StatusCode::kBudget:
      throw SessionError(Kind::kBudget, status.message());
    case StatusCode::kStorage:
      throw SessionError(Kind::kStorage, status.message(), status.error_number());
    case StatusCode::kCorrupt:
      throw SessionError(Kind::kCorrupt, status.message());
  }
}

DType engine_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      TORCH_CHECK_VALUE(false, "session: dtype must be float32, bfloat16 or float16, got ", dtype);
  }
}

QueryView query_view(const at::Tensor& query) {
  return {.data = query.data_ptr(),
          .batch_stride = query.stride(0),
          .head_stride = query.stride(1),
          .query_stride = query.stride(2),
          .heads = query.size(1),
          .queries = query.size(2),
          .dtype = engine_dtype(query.scalar_type())};
}

namespace {

template <typename T>
T parse(const char* field, const std::string& value,
        std::initializer_list<std::pair<const char*, T>> names) {
  std::string known;
  for (const auto& [name, parsed] : names) {
    if (value == name) return parsed;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  TORCH_CHECK_VALUE(false, "session: ", field, " must be one of ", known, ", got '", value, "'");
}

EngineOptions engine_options(const SessionOptions& from) {
  EngineOptions to;
  to.layers = from.layers;
  to.heads = from.heads;
  to.kv_heads = from.kv_heads;
  to.head_dim = from.head_dim;
  to.dtype = engine_dtype(from.dtype);
  to.file.directory = from.directory;
  to.file.mode = parse<IoMode>(
      "io_mode", from.io_mode,
      {{"auto", IoMode::kAuto}, {"direct", IoMode::kDirect}, {"buffered", IoMode::kBuffered}});
  to.file.quota_bytes = from.disk_quota_bytes;
  to.reader.kind = parse<ReaderKind>("reader", from.reader,
                                     {{"auto", ReaderKind::kAuto},
                                      {"uring", ReaderKind::kUring},
                                      {"threads", ReaderKind::kThreads},
                                      {"sync", ReaderKind::kSync}});
  to.reader.depth = static_cast<int>(from.read_depth);
  to.device_model = from.device_model;
  to.merge_gap_bytes = from.merge_gap_bytes;
  to.merge_bytes_max = from.merge_bytes_max;
  to.checksum = from.checksum;
  to.page_place = from.staged_pages ? PagePlace::kStaged : PagePlace::kDirect;
  to.group_tokens = from.group_tokens;
  to.ranks = from.ranks.size() == 1 ? std::vector<int64_t>(from.layers, from.ranks[0]) : from.ranks;
  to.summary_dtype = parse<DType>("summary_dtype", from.summary_dtype,
                                  {{"model", to.dtype}, {"int8", DType::kInt8}});
  to.groups_max = from.groups_max;
  to.pages_max = from.pages_max;
  to.sink_tokens = from.sink_tokens;
  to.tail_tokens = from.tail_tokens;
  to.replacement = parse<Replacement>(
      "replacement", from.replacement,
      {{"fifo", Replacement::kFifo}, {"lru", Replacement::kLru}, {"unused", Replacement::kUnused}});
  to.select_queries_max = from.select_queries_max;
  to.kv_memory_bytes = from.kv_memory_bytes;
  to.max_context = from.max_context;
  to.max_batch = from.max_batch;
  return to;
}

}  // namespace

class Session::Impl {
 public:
  Impl(const EngineOptions& options, std::unique_ptr<Engine> engine)
      : dtype(options.dtype), engine_(std::move(engine)) {}

  Engine& engine() {
    if (engine_ == nullptr) {
      throw SessionError(SessionError::Kind::kClosed,
                         "session: must be open, got a call after close()");
    }
    return *engine_;
  }
  void close() { engine_.reset(); }

  /// [batch, heads, tokens, head_dim] on the CPU, of this session's dtype.
  void check(const char* where, const char* name, const at::Tensor& tensor, int64_t heads,
             int64_t other_heads) {
    const EngineOptions& options = engine().options();
    TORCH_CHECK_VALUE(tensor.device().is_cpu(), where, ": ", name,
                      " must be on the CPU (this build has no other device), got ",
                      tensor.device());
    TORCH_CHECK_VALUE(tensor.dim() == 4 &&
                          (tensor.size(1) == heads || tensor.size(1) == other_heads) &&
                          tensor.size(3) == options.head_dim,
                      where, ": ", name, " must be [batch, ", heads, ", tokens, ", options.head_dim,
                      "], got ", tensor.sizes());
    TORCH_CHECK_VALUE(engine_dtype(tensor.scalar_type()) == options.dtype, where, ": ", name,
                      " must have the session's dtype, got ", tensor.scalar_type());
  }

  const DType dtype;

 private:
  std::unique_ptr<Engine> engine_;
};

Session::Session(const SessionOptions& options) {
  EngineOptions engine_of = engine_options(options);
  auto engine = Engine::create(engine_of, at_parallel_for());
  throw_if_error(engine.status());
  impl_ = std::make_unique<Impl>(engine_of, std::move(engine.value()));
}

Session::~Session() = default;

std::map<std::string, int64_t> Session::memory_need(const SessionOptions& options, int64_t batch,
                                                    int64_t context, int64_t alignment_bytes) {
  const EngineOptions engine_of = engine_options(options);
  throw_if_error(engine_of.validate());
  const int64_t record_bytes =
      (engine_of.payload_bytes() + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
  const MemoryNeed need = kvswap::memory_need(engine_of, record_bytes, batch, context);
  return {{"pages", need.pages},     {"summary", need.summary},         {"tables", need.tables},
          {"staging", need.staging}, {"projections", need.projections}, {"scratch", need.scratch},
          {"total", need.total()},   {"record_bytes", record_bytes}};
}

void Session::declare(const at::Tensor& valid) {
  TORCH_CHECK_VALUE(valid.dim() == 2 && valid.scalar_type() == at::kBool,
                    "declare: valid must be a [batch, tokens] bool tensor, got ", valid.sizes(),
                    " of ", valid.scalar_type());
  const at::Tensor packed = valid.to(at::kCPU).contiguous();
  throw_if_error(impl_->engine().declare(packed.size(0), packed.size(1), packed.data_ptr<bool>()));
}

void Session::look_ahead(int64_t layer, const at::Tensor& query) {
  const EngineOptions& options = impl_->engine().options();
  impl_->check("look_ahead", "query", query, options.heads, options.kv_heads);
  const at::Tensor packed = query.stride(3) == 1 ? query : query.contiguous();
  throw_if_error(impl_->engine().look_ahead(layer, query_view(packed)));
}

void Session::override_selection(int64_t layer, const std::vector<std::vector<int64_t>>& groups) {
  std::vector<std::vector<int32_t>> narrow;
  for (const auto& of_sequence : groups)
    narrow.emplace_back(of_sequence.begin(), of_sequence.end());
  throw_if_error(impl_->engine().override_selection(layer, std::move(narrow)));
}

void Session::append(int64_t layer, const at::Tensor& keys, const at::Tensor& values) {
  const EngineOptions& options = impl_->engine().options();
  impl_->check("append", "keys", keys, options.kv_heads, options.kv_heads);
  impl_->check("append", "values", values, options.kv_heads, options.kv_heads);
  TORCH_CHECK_VALUE(keys.sizes() == values.sizes(),
                    "append: keys and values must have one shape, got ", keys.sizes(), " and ",
                    values.sizes());
  const at::Tensor k = keys.stride(3) == 1 ? keys : keys.contiguous();
  const at::Tensor v = values.stride(3) == 1 ? values : values.contiguous();
  throw_if_error(impl_->engine().append(layer, {.keys = k.data_ptr(),
                                                .values = v.data_ptr(),
                                                .key_batch_stride = k.stride(0),
                                                .key_head_stride = k.stride(1),
                                                .key_token_stride = k.stride(2),
                                                .value_batch_stride = v.stride(0),
                                                .value_head_stride = v.stride(1),
                                                .value_token_stride = v.stride(2),
                                                .batch = k.size(0),
                                                .tokens = k.size(2)}));
}

at::Tensor Session::attend(int64_t layer, const at::Tensor& query, const at::Tensor& keys,
                           const at::Tensor& values, double scale) {
  Engine& engine = impl_->engine();
  impl_->check("attend", "query", query, engine.options().heads, engine.options().heads);
  TORCH_CHECK_VALUE(query.size(0) == engine.batch(), "attend: batch must be ", engine.batch(),
                    ", got ", query.size(0));
  if (query.size(2) > engine.options().select_queries_max) {
    TORCH_CHECK_VALUE(keys.sizes() == values.sizes() && keys.size(2) == query.size(2),
                      "attend: a long chunk must come with its own keys and values, got ",
                      keys.sizes(), " for a query of ", query.sizes());
    return attend_exactly(engine, layer, query, keys, values, scale);
  }
  const at::Tensor packed = query.stride(3) == 1 ? query : query.contiguous();
  at::Tensor output =
      at::empty({query.size(0), query.size(2), query.size(1), query.size(3)}, query.options());
  throw_if_error(engine.attend({.layer = layer,
                                .query = query_view(packed),
                                .output = output.data_ptr(),
                                .scale = static_cast<float>(scale)}));
  return output;
}

void Session::set_projection(int64_t layer, const at::Tensor& key_projection,
                             const at::Tensor& query_projection) {
  Engine& engine = impl_->engine();
  const int64_t width = engine.options().kv_heads * engine.options().head_dim;
  TORCH_CHECK_VALUE(key_projection.sizes() == query_projection.sizes() &&
                        key_projection.dim() == 2 && key_projection.size(0) == width,
                    "set_projection: both projections must be [", width, ", rank], got ",
                    key_projection.sizes(), " and ", query_projection.sizes());
  const at::Tensor keys = key_projection.to(at::kCPU, at::kFloat).contiguous();
  const at::Tensor queries = query_projection.to(at::kCPU, at::kFloat).contiguous();
  TORCH_CHECK_VALUE(keys.isfinite().all().item<bool>() && queries.isfinite().all().item<bool>(),
                    "set_projection: all numbers must be finite in layer ", layer);
  throw_if_error(engine.set_projection(layer, keys.size(1), keys.data_ptr<float>(),
                                       queries.data_ptr<float>()));
}

bool Session::needs_projection(int64_t layer) const {
  return impl_->engine().needs_projection(layer);
}

std::pair<at::Tensor, at::Tensor> Session::read_back(int64_t layer, int64_t begin, int64_t end) {
  Engine& engine = impl_->engine();
  const EngineOptions& options = engine.options();
  TORCH_CHECK_VALUE(begin >= 0 && begin <= end, "read_back: columns must rise, got ", begin, "..",
                    end);
  const at::ScalarType dtype = options.dtype == DType::kFloat32    ? at::kFloat
                               : options.dtype == DType::kBFloat16 ? at::kBFloat16
                                                                   : at::kHalf;
  at::Tensor keys =
      at::empty({engine.batch(), options.kv_heads, end - begin, options.head_dim}, dtype);
  at::Tensor values = at::empty_like(keys);
  for (int64_t sequence = 0; sequence < engine.batch(); ++sequence) {
    throw_if_error(engine.read_back(layer, sequence, begin, end, keys[sequence].data_ptr(),
                                    values[sequence].data_ptr()));
  }
  return {keys, values};
}

std::vector<std::vector<int64_t>> Session::last_selection(int64_t layer) const {
  const auto& chosen = impl_->engine().last_selection(layer);
  std::vector<std::vector<int64_t>> selection;
  for (const auto& groups : chosen) selection.emplace_back(groups.begin(), groups.end());
  return selection;
}

void Session::select_sequences(const std::vector<int64_t>& indices) {
  throw_if_error(impl_->engine().select_sequences(indices));
}

void Session::crop(int64_t columns) { throw_if_error(impl_->engine().crop(columns)); }

void Session::reset() { impl_->engine().reset(); }

void Session::close() noexcept { impl_->close(); }

int64_t Session::columns(int64_t layer) const { return impl_->engine().columns(layer); }

int64_t Session::batch() const { return impl_->engine().batch(); }

std::map<std::string, double> Session::counters() const { return engine_counters(impl_->engine()); }

std::map<std::string, std::string> Session::facts() const { return engine_facts(impl_->engine()); }

std::map<std::string, int64_t> Session::ledger() const { return engine_ledger(impl_->engine()); }

}  // namespace kvswap
