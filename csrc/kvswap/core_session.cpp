#include "kvswap/core_session.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "engine/engine.h"
#include "engine/engine_report.h"
#include "kvswap/engine_calls.h"
#include "kvswap/one_caller.h"
#include "kvswap/saved_session.h"

namespace kvswap {

class CoreSession::Impl {
 public:
  Impl(const CoreOptions& options, std::unique_ptr<Engine> engine)
      : options_(options), engine_(std::move(engine)) {}

  /// One call: nobody else is in the session while it lives.
  class Use {
   public:
    explicit Use(Impl& impl) : impl_(impl), call_(std::in_place, impl.caller_) {}
    ~Use() {
      call_.reset();
      if (impl_.caller_.is_close_due()) impl_.close();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Impl& impl_;
    std::optional<OneCaller::Call> call_;
  };

  Engine& engine() const { return *engine_; }

  /// For what Engine answers without a Status.
  Engine& engine_with(int64_t layer) const {
    const int64_t layers = engine().options().layers;
    if (layer < 0 || layer >= layers) {
      throw std::invalid_argument("session: layer must be 0.." + std::to_string(layers - 1) +
                                  ", got " + std::to_string(layer));
    }
    return *engine_;
  }

  void check_query(const char* where, const Queries& query, bool may_be_summed) const {
    const EngineOptions& options = engine().options();
    const bool is_summed = may_be_summed && query.heads == options.kv_heads;
    if (query.heads != options.query_heads && !is_summed) {
      throw std::invalid_argument(std::string(where) + ": query must have " +
                                  std::to_string(options.query_heads) + " heads" +
                                  (may_be_summed ? ", or kv_heads summed" : "") + ", got " +
                                  std::to_string(query.heads));
    }
    if (!query.data || query.tokens < 1) {
      throw std::invalid_argument(std::string(where) + ": query must have data and tokens, got " +
                                  std::to_string(query.tokens) + " tokens");
    }
  }

  const CoreOptions& options() const { return options_; }
  void close() noexcept {
    if (!caller_.close([this] { engine_->patience().stop(); })) return;
    engine_.reset();
    caller_.closed();
  }

 private:
  CoreOptions options_;
  std::unique_ptr<Engine> engine_;
  OneCaller caller_;
};

NewTokens NewTokens::packed(const void* keys, const void* values, const ModelShape& shape,
                            int64_t batch, int64_t tokens) {
  const int64_t head_stride = tokens * shape.head_dim;
  return {.keys = keys,
          .values = values,
          .batch = batch,
          .tokens = tokens,
          .key_batch_stride = shape.kv_heads * head_stride,
          .key_head_stride = head_stride,
          .key_token_stride = shape.head_dim,
          .value_batch_stride = shape.kv_heads * head_stride,
          .value_head_stride = head_stride,
          .value_token_stride = shape.head_dim};
}

Queries Queries::packed(const void* data, int64_t heads, int64_t tokens, int64_t head_dim) {
  return {.data = data,
          .heads = heads,
          .tokens = tokens,
          .batch_stride = heads * tokens * head_dim,
          .head_stride = tokens * head_dim,
          .token_stride = head_dim};
}

CoreSession::CoreSession(const CoreOptions& options) {
  auto engine = Engine::create(engine_options(options), options.threads);
  throw_status(engine.status());
  impl_ = std::make_unique<Impl>(options, std::move(engine.value()));
}

CoreSession::CoreSession(const SavedCache& saved, const CoreOptions& options)
    : impl_(std::make_unique<Impl>(options, open_engine(saved, options, options.threads))) {}

CoreSession::CoreSession(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

CoreSession::~CoreSession() = default;

void CoreSession::save(const SaveArgs& args) {
  const Impl::Use use(*impl_);
  save_engine(impl_->engine(), impl_->options(), args);
}

std::unique_ptr<CoreSession> CoreSession::fork() {
  const Impl::Use use(*impl_);
  auto engine = fork_engine(impl_->engine(), impl_->options().threads);
  return std::unique_ptr<CoreSession>(
      new CoreSession(std::make_unique<Impl>(impl_->options(), std::move(engine))));
}

std::map<std::string, int64_t> CoreSession::memory_need(const CoreOptions& options, int64_t batch,
                                                        int64_t context, int64_t alignment_bytes) {
  const EngineOptions engine_of = engine_options(options);
  throw_status(engine_of.validate());
  if (batch < 0 || context < 0 || alignment_bytes < 1) {
    throw std::invalid_argument("memory_need: batch, context and alignment must not be negative");
  }
  const int64_t record_bytes =
      (engine_of.payload_bytes() + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
  const MemoryNeed need = kvswap::memory_need(engine_of, record_bytes, batch, context);
  return {{"pages", need.pages},       {"kept", need.kept},       {"summary", need.summary},
          {"tables", need.tables},     {"staging", need.staging}, {"projections", need.projections},
          {"scratch", need.scratch},   {"device", need.device},   {"pinned", need.pinned},
          {"timeline", need.timeline}, {"total", need.total()},   {"record_bytes", record_bytes}};
}

void CoreSession::declare(int64_t batch, int64_t tokens, const bool* valid) {
  const Impl::Use use(*impl_);
  throw_status(impl_->engine().declare(batch, tokens, valid));
}

void CoreSession::look_ahead(int64_t layer, const Queries& query, std::optional<float> scale) {
  const Impl::Use use(*impl_);
  impl_->check_query("look_ahead", query, true);
  Engine& engine = impl_->engine();
  throw_status(engine.look_ahead(layer, query_view(query, engine.options().dtype), scale));
}

void CoreSession::give_scores(int64_t layer, std::span<const float> scores, int64_t queries) {
  const Impl::Use use(*impl_);
  Engine& engine = impl_->engine_with(layer);
  const int64_t parts = engine.batch() * engine.heads_apart();
  const int64_t groups = engine.sealed_groups(layer);
  if (static_cast<int64_t>(scores.size()) != parts * queries * groups) {
    throw std::invalid_argument("give_scores: scores must be [" + std::to_string(parts) + ", " +
                                std::to_string(queries) + ", " + std::to_string(groups) +
                                "], got " + std::to_string(scores.size()) + " numbers");
  }
  throw_status(engine.give_scores(layer, {scores.data(), parts, queries, groups}));
}

void CoreSession::give_worth(int64_t layer, std::span<const float> worth,
                             std::span<const float> decay) {
  const Impl::Use use(*impl_);
  Engine& engine = impl_->engine_with(layer);
  const int64_t parts = std::max<int64_t>(1, engine.batch() * engine.heads_apart());
  const auto count = static_cast<int64_t>(worth.size());
  if (count % parts != 0 || (!decay.empty() && decay.size() != worth.size())) {
    throw std::invalid_argument("give_worth: worth must be [" + std::to_string(parts) +
                                ", tokens] and decay as much or empty, got " +
                                std::to_string(count) + " and " + std::to_string(decay.size()) +
                                " numbers");
  }
  throw_status(engine.give_worth(
      layer, {worth.data(), decay.empty() ? nullptr : decay.data(), parts, count / parts}));
}

bool CoreSession::needs_scores(int64_t layer, int64_t queries) const {
  const Impl::Use use(*impl_);
  return impl_->engine_with(layer).needs_scores(layer, queries);
}

void CoreSession::append(int64_t layer, const NewTokens& tokens) {
  const Impl::Use use(*impl_);
  Engine& engine = impl_->engine();
  if (!tokens.keys || !tokens.values || tokens.batch < 1 || tokens.tokens < 1) {
    throw std::invalid_argument("append: must have keys and values of a batch of tokens, got " +
                                std::to_string(tokens.batch) + " x " +
                                std::to_string(tokens.tokens));
  }
  throw_status(engine.append(layer, key_value_view(tokens)));
}

void CoreSession::attend(int64_t layer, const Queries& query, float scale, void* output,
                         const CapAndSinks& terms) {
  const Impl::Use use(*impl_);
  impl_->check_query("attend", query, false);
  Engine& engine = impl_->engine_with(layer);
  if (!(terms.softcap >= 0)) {
    throw std::invalid_argument("attend: softcap must be at least 0, got " +
                                std::to_string(terms.softcap));
  }
  const AttendArgs args = {.layer = layer,
                           .query = query_view(query, engine.options().dtype),
                           .output = output,
                           .scale = scale,
                           .softcap = terms.softcap,
                           .sinks = terms.sinks};
  if (!engine.attends_exactly(layer, query.tokens)) {
    throw_status(engine.attend(args));
    return;
  }
  if (query.tokens > engine.columns(layer)) {
    throw std::invalid_argument("attend: query must be of the " +
                                std::to_string(engine.columns(layer)) +
                                " columns in the layer, got " + std::to_string(query.tokens));
  }
  throw_status(attend_exactly(engine, args, impl_->options().threads));
}

void CoreSession::set_projection(int64_t layer, const Projection& projection) {
  const Impl::Use use(*impl_);
  Engine& engine = impl_->engine_with(layer);
  const EngineOptions& options = engine.options();
  const int64_t width = options.kv_heads * options.head_dim;
  const auto size = static_cast<size_t>(width * projection.rank);
  if (projection.width != width || projection.rank < 1 || projection.keys.size() != size ||
      projection.queries.size() != size) {
    throw std::invalid_argument(
        "set_projection: both projections must be [" + std::to_string(width) + ", rank], got [" +
        std::to_string(projection.width) + ", " + std::to_string(projection.rank) + "]");
  }
  throw_status(engine.set_projection(layer, projection.rank, projection.keys.data(),
                                     projection.queries.data()));
}

bool CoreSession::needs_projection(int64_t layer) const {
  const Impl::Use use(*impl_);
  return impl_->engine_with(layer).needs_projection(layer);
}

void CoreSession::read_back(int64_t layer, int64_t sequence, int64_t begin, int64_t end, void* keys,
                            void* values) {
  const Impl::Use use(*impl_);
  throw_status(impl_->engine().read_back(layer, sequence, begin, end, keys, values));
}

std::vector<std::vector<int64_t>> CoreSession::last_selection(int64_t layer) const {
  const Impl::Use use(*impl_);
  std::vector<std::vector<int64_t>> selection;
  for (const auto& groups : impl_->engine_with(layer).last_selection(layer)) {
    selection.emplace_back(groups.begin(), groups.end());
  }
  return selection;
}

void CoreSession::select_sequences(std::span<const int64_t> indices) {
  const Impl::Use use(*impl_);
  throw_status(impl_->engine().select_sequences(indices));
}

void CoreSession::crop(int64_t columns) {
  const Impl::Use use(*impl_);
  throw_status(impl_->engine().crop(columns));
}

void CoreSession::reset() {
  const Impl::Use use(*impl_);
  throw_status(impl_->engine().reset());
}

void CoreSession::close() noexcept { impl_->close(); }

int64_t CoreSession::columns(int64_t layer) const {
  const Impl::Use use(*impl_);
  return impl_->engine_with(layer).columns(layer);
}

int64_t CoreSession::batch() const {
  const Impl::Use use(*impl_);
  return impl_->engine().batch();
}

const CoreOptions& CoreSession::options() const { return impl_->options(); }

std::map<std::string, double> CoreSession::counters() const {
  const Impl::Use use(*impl_);
  return engine_counters(impl_->engine());
}

std::map<std::string, std::string> CoreSession::facts() const {
  const Impl::Use use(*impl_);
  return engine_facts(impl_->engine());
}

std::map<std::string, int64_t> CoreSession::ledger() const {
  const Impl::Use use(*impl_);
  return engine_ledger(impl_->engine());
}

std::string CoreSession::timeline() const {
  const Impl::Use use(*impl_);
  std::string trace;
  throw_status(engine_timeline(impl_->engine(), trace));
  return trace;
}

}  // namespace kvswap
