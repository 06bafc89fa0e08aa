#include "torch/session.h"

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <utility>

#include "engine/engine.h"
#include "engine/engine_report.h"
#include "kvswap/engine_calls.h"
#include "kvswap/one_caller.h"
#include "kvswap/saved_session.h"
#include "torch/engine_calls.h"
#include "torch/op_checks.h"
#include "torch/parallel.h"
#include "torch/torch_device.h"

namespace kvswap {
namespace {

/// With a contiguous last dimension, and aligned as kernels of a device want it.
at::Tensor plain(const at::Tensor& tensor) {
  const bool is_aligned =
      tensor.is_cpu() || reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  if (tensor.stride(3) == 1 && is_aligned) return tensor;
  return tensor.clone(at::MemoryFormat::Contiguous);
}

KeyValueView token_view(const at::Tensor& keys, const at::Tensor& values) {
  return {.keys = keys.data_ptr(),
          .values = values.data_ptr(),
          .key_batch_stride = keys.stride(0),
          .key_head_stride = keys.stride(1),
          .key_token_stride = keys.stride(2),
          .value_batch_stride = values.stride(0),
          .value_head_stride = values.stride(1),
          .value_token_stride = values.stride(2),
          .batch = keys.size(0),
          .tokens = keys.size(2)};
}

}  // namespace

class Session::Impl {
 public:
  Impl(const CoreOptions& options, std::unique_ptr<Engine> engine)
      : device(tensor_device(options.device)), options(options), engine_(std::move(engine)) {}

  /// One call: nobody else is in the session while it lives.
  class Use {
   public:
    explicit Use(Impl& impl) : impl_(impl), call_(std::in_place, impl.caller_) {
      if (impl.device.is_cuda()) {
        engine().parts().space->compute().set_compute_stream(current_stream(impl.device));
      }
    }
    ~Use() {
      call_.reset();
      if (impl_.caller_.is_close_due()) impl_.close();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    Engine& engine() const { return *impl_.engine_; }

   private:
    Impl& impl_;
    std::optional<OneCaller::Call> call_;
  };

  void close() {
    if (!caller_.close([this] { engine_->patience().stop(); })) return;
    engine_.reset();
    caller_.closed();
  }
  void set_question(std::function<bool()> shall_end) {
    engine_->patience().set_question(std::move(shall_end));
  }

  /// [batch, heads, tokens, head_dim] on this session's device and of its dtype.
  void check(const char* where, const char* name, const at::Tensor& tensor, int64_t heads,
             int64_t other_heads) {
    const EngineOptions& options = engine_->options();
    TORCH_CHECK_VALUE(tensor.device() == device, where, ": ", name,
                      " must be on the session's device, ", device, ", got ", tensor.device());
    TORCH_CHECK_VALUE(tensor.dim() == 4 &&
                          (tensor.size(1) == heads || tensor.size(1) == other_heads) &&
                          tensor.size(3) == options.head_dim,
                      where, ": ", name, " must be [batch, ", heads, ", tokens, ", options.head_dim,
                      "], got ", tensor.sizes());
    TORCH_CHECK_VALUE(engine_dtype(tensor.scalar_type()) == options.dtype, where, ": ", name,
                      " must have the session's dtype, got ", tensor.scalar_type());
  }

  void check_query(const char* where, const at::Tensor& query) {
    check(where, "query", query, engine_->options().query_heads, engine_->options().query_heads);
  }
  void check_tokens(const char* where, const at::Tensor& keys, const at::Tensor& values) {
    const int64_t kv_heads = engine_->options().kv_heads;
    check(where, "keys", keys, kv_heads, kv_heads);
    check(where, "values", values, kv_heads, kv_heads);
    TORCH_CHECK_VALUE(keys.sizes() == values.sizes(), where,
                      ": keys and values must have one shape, got ", keys.sizes(), " and ",
                      values.sizes());
  }

  const at::Device device;  // of tensors
  const CoreOptions options;

 private:
  std::unique_ptr<Engine> engine_;
  OneCaller caller_;
};

/// What the torch-free part calls an invalid argument is a c10::ValueError here.
template <typename Call>
auto with_value_errors(const Call& call) {
  try {
    return call();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

Session::Session(const CoreOptions& options) {
  auto engine =
      Engine::create(with_value_errors([&] { return engine_options(options); }), at_parallel_for());
  throw_if_error(engine.status());
  impl_ = std::make_unique<Impl>(options, std::move(engine.value()));
}

Session::Session(const SavedCache& saved, const CoreOptions& options)
    : impl_(std::make_unique<Impl>(options, open_engine(saved, options, at_parallel_for()))) {}

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Session::~Session() = default;

void Session::save(const SaveArgs& args) {
  const Impl::Use use(*impl_);
  save_engine(use.engine(), impl_->options, args);
}

std::unique_ptr<Session> Session::fork() {
  const Impl::Use use(*impl_);
  auto engine = fork_engine(use.engine(), at_parallel_for());
  return std::unique_ptr<Session>(
      new Session(std::make_unique<Impl>(impl_->options, std::move(engine))));
}

std::map<std::string, int64_t> Session::memory_need(const CoreOptions& options, int64_t batch,
                                                    int64_t context, int64_t alignment_bytes) {
  return with_value_errors(
      [&] { return CoreSession::memory_need(options, batch, context, alignment_bytes); });
}

void Session::declare(const at::Tensor& valid) {
  const Impl::Use use(*impl_);
  TORCH_CHECK_VALUE(valid.dim() == 2 && valid.scalar_type() == at::kBool,
                    "declare: valid must be a [batch, tokens] bool tensor, got ", valid.sizes(),
                    " of ", valid.scalar_type());
  const at::Tensor packed = valid.to(at::kCPU).contiguous();
  throw_if_error(use.engine().declare(packed.size(0), packed.size(1), packed.data_ptr<bool>()));
}

void Session::look_ahead(int64_t layer, const at::Tensor& query, std::optional<double> scale) {
  const Impl::Use use(*impl_);
  const EngineOptions& options = use.engine().options();
  impl_->check("look_ahead", "query", query, options.query_heads, options.kv_heads);
  const at::Tensor packed = plain(query);
  const auto narrow = scale ? std::optional(static_cast<float>(*scale)) : std::nullopt;
  throw_if_error(use.engine().look_ahead(layer, query_view(packed), narrow));
}

void Session::override_selection(int64_t layer, const std::vector<std::vector<int64_t>>& groups) {
  const Impl::Use use(*impl_);
  std::vector<std::vector<int32_t>> narrow;
  for (const auto& each : groups) narrow.emplace_back(each.begin(), each.end());
  throw_if_error(use.engine().override_selection(layer, std::move(narrow)));
}

void Session::give_scores(int64_t layer, const at::Tensor& scores) {
  const Impl::Use use(*impl_);
  const at::Tensor packed = host_numbers("give_scores: scores", scores, 3);
  throw_if_error(use.engine().give_scores(
      layer, {packed.data_ptr<float>(), packed.size(0), packed.size(1), packed.size(2)}));
}

void Session::give_worth(int64_t layer, const at::Tensor& worth,
                         const std::optional<at::Tensor>& decay) {
  const Impl::Use use(*impl_);
  const at::Tensor packed = host_numbers("give_worth: worth", worth, 2);
  at::Tensor lost;
  if (decay) {
    lost = host_numbers("give_worth: decay", *decay, 2);
    TORCH_CHECK_VALUE(lost.sizes() == packed.sizes(), "give_worth: decay must be as worth, ",
                      packed.sizes(), ", got ", lost.sizes());
  }
  throw_if_error(use.engine().give_worth(
      layer, {packed.data_ptr<float>(), decay ? lost.data_ptr<float>() : nullptr, packed.size(0),
              packed.size(1)}));
}

bool Session::needs_scores(int64_t layer, int64_t queries) const {
  const Impl::Use use(*impl_);
  return use.engine().needs_scores(layer, queries);
}

void Session::append(int64_t layer, const at::Tensor& keys, const at::Tensor& values) {
  const Impl::Use use(*impl_);
  impl_->check_tokens("append", keys, values);
  const at::Tensor k = plain(keys);
  const at::Tensor v = plain(values);
  throw_if_error(use.engine().append(layer, token_view(k, v)));
}

at::Tensor Session::attend(int64_t layer, const at::Tensor& query, const at::Tensor& keys,
                           const at::Tensor& values, double scale, const ScoreTerms& terms) {
  const Impl::Use use(*impl_);
  impl_->check_query("attend", query);
  return attend_now(use.engine(), layer, query, keys, values, scale, terms);
}

at::Tensor Session::attend_now(Engine& engine, int64_t layer, const at::Tensor& query,
                               const at::Tensor& keys, const at::Tensor& values, double scale,
                               const ScoreTerms& terms) {
  const at::Tensor sinks = contiguous_sinks("attend", terms.sinks, query);
  TORCH_CHECK_VALUE(query.size(0) == engine.batch(), "attend: batch must be ", engine.batch(),
                    ", got ", query.size(0));
  if (engine.attends_exactly(layer, query.size(2))) {
    TORCH_CHECK_VALUE(keys.sizes() == values.sizes() && keys.size(2) == query.size(2),
                      "attend: a long chunk must come with its own keys and values, got ",
                      keys.sizes(), " for a query of ", query.sizes());
    const int64_t past = engine.columns(layer) - query.size(2);
    return attend_exactly(engine, {layer, past, query, keys, values, scale, terms.softcap, sinks});
  }
  const at::Tensor packed = plain(query);
  at::Tensor output =
      at::empty({query.size(0), query.size(2), query.size(1), query.size(3)}, query.options());
  throw_if_error(engine.attend({.layer = layer,
                                .query = query_view(packed),
                                .output = output.data_ptr(),
                                .scale = static_cast<float>(scale),
                                .softcap = static_cast<float>(terms.softcap),
                                .sinks = sinks.defined() ? sinks.data_ptr<float>() : nullptr}));
  return output;
}

at::Tensor Session::extend(int64_t layer, const at::Tensor& query, const at::Tensor& keys,
                           const at::Tensor& values, double scale, const ScoreTerms& terms) {
  const Impl::Use use(*impl_);
  Engine& engine = use.engine();
  impl_->check_tokens("extend", keys, values);
  impl_->check_query("extend", query);
  const at::Tensor sinks = contiguous_sinks("extend", terms.sinks, query);
  TORCH_CHECK_VALUE(query.size(0) == keys.size(0) && query.size(2) == keys.size(2),
                    "extend: query, keys and values must have one batch and length, got ",
                    query.sizes(), " and ", keys.sizes());
  const at::Tensor k = plain(keys);
  const at::Tensor v = plain(values);
  if (!engine.attends_exactly(layer, query.size(2))) {
    throw_if_error(engine.append(layer, token_view(k, v)));
    return attend_now(engine, layer, query, k, v, scale, terms);
  }
  throw_if_error(engine.prepare(layer, k.size(0), k.size(2)));
  at::Tensor output = attend_exactly(
      engine, {layer, engine.columns(layer), query, k, v, scale, terms.softcap, sinks});
  throw_if_error(engine.append(layer, token_view(k, v)));
  engine.end_chunk(layer, k.size(2));
  return output;
}

void Session::set_projection(int64_t layer, const at::Tensor& key_projection,
                             const at::Tensor& query_projection) {
  const Impl::Use use(*impl_);
  Engine& engine = use.engine();
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
  const Impl::Use use(*impl_);
  return use.engine().needs_projection(layer);
}

bool Session::attends_all(int64_t layer) const {
  const Impl::Use use(*impl_);
  return use.engine().attends_all(layer);
}

std::pair<at::Tensor, at::Tensor> Session::read_back(int64_t layer, int64_t begin, int64_t end) {
  const Impl::Use use(*impl_);
  Engine& engine = use.engine();
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
  return {keys.to(impl_->device), values.to(impl_->device)};
}

std::vector<std::vector<int64_t>> Session::last_selection(int64_t layer) const {
  const Impl::Use use(*impl_);
  const auto& chosen = use.engine().last_selection(layer);
  std::vector<std::vector<int64_t>> selection;
  for (const auto& groups : chosen) selection.emplace_back(groups.begin(), groups.end());
  return selection;
}

void Session::select_sequences(const std::vector<int64_t>& indices) {
  const Impl::Use use(*impl_);
  throw_if_error(use.engine().select_sequences(indices));
}

void Session::crop(int64_t columns) {
  const Impl::Use use(*impl_);
  throw_if_error(use.engine().crop(columns));
}

void Session::reset() {
  const Impl::Use use(*impl_);
  throw_if_error(use.engine().reset());
}

void Session::close() noexcept { impl_->close(); }

void Session::set_question(std::function<bool()> shall_end) {
  const Impl::Use use(*impl_);
  impl_->set_question(std::move(shall_end));
}

int64_t Session::columns(int64_t layer) const {
  const Impl::Use use(*impl_);
  return use.engine().columns(layer);
}

int64_t Session::common_columns() const {
  const Impl::Use use(*impl_);
  const Engine& engine = use.engine();
  for (int64_t layer = 1; layer < engine.options().layers; ++layer) {
    if (engine.columns(layer) != engine.columns(0)) return -1;
  }
  return engine.columns(0);
}

int64_t Session::batch() const {
  const Impl::Use use(*impl_);
  return use.engine().batch();
}

std::map<std::string, double> Session::counters() const {
  const Impl::Use use(*impl_);
  return engine_counters(use.engine());
}

std::map<std::string, std::string> Session::facts() const {
  const Impl::Use use(*impl_);
  return engine_facts(use.engine());
}

std::map<std::string, int64_t> Session::ledger() const {
  const Impl::Use use(*impl_);
  return engine_ledger(use.engine());
}

std::string Session::timeline() const {
  const Impl::Use use(*impl_);
  std::string trace;
  throw_if_error(engine_timeline(use.engine(), trace));
  return trace;
}

void Session::record_predict(int64_t layer, int64_t began_ns) {
  const Impl::Use use(*impl_);
  Timeline* timeline = use.engine().parts().timeline.get();
  if (timeline == nullptr) return;
  timeline->record({.kind = SpanKind::kPredict,
                    .layer = layer,
                    .begin_ns = began_ns,
                    .end_ns = Timeline::now_ns()});
}

}  // namespace kvswap
