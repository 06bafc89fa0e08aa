#include "kvswap/cache.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <new>
#include <optional>
#include <utility>

#include "engine/report/engine_report.h"
#include "engine/settings_check.h"
#include "kvswap/cache_impl.h"
#include "kvswap/engine_calls.h"
#include "kvswap/prefill_attention.h"
#include "kvswap/saved_session.h"

namespace kvswap {
namespace {

void check_heads(const char* where, const Queries& query, const EngineOptions& options) {
  if (query.heads != options.query_heads) {
    throw std::invalid_argument(std::string(where) + ": query must have " +
                                std::to_string(options.query_heads) + " heads, got " +
                                std::to_string(query.heads));
  }
  if (!query.data || query.tokens < 1) {
    throw std::invalid_argument(std::string(where) + ": query must have data and tokens, got " +
                                std::to_string(query.tokens) + " tokens");
  }
}

/// Also of heads that are summed.
void check_look_ahead(const Queries& query, const EngineOptions& options) {
  if (query.heads == options.kv_heads && query.data && query.tokens >= 1) return;
  if (query.heads == options.query_heads) return check_heads("look_ahead", query, options);
  throw std::invalid_argument("look_ahead: query must have data, tokens and " +
                              std::to_string(options.query_heads) +
                              " heads, or kv_heads summed, got " + std::to_string(query.heads));
}

void check_batch(const char* where, const Queries& query, int64_t batch) {
  if (query.batch == 0 || query.batch == batch) return;
  throw std::invalid_argument(std::string(where) + ": batch must be " + std::to_string(batch) +
                              ", got " + std::to_string(query.batch));
}

void check_tokens(const char* where, const NewTokens& tokens, int64_t sides) {
  if (!tokens.keys || !tokens.values || tokens.batch < 1 || tokens.tokens < 1) {
    throw std::invalid_argument(
        std::string(where) + ": must have keys and values of a batch of tokens, got " +
        std::to_string(tokens.batch) + " x " + std::to_string(tokens.tokens));
  }
  const bool is_one = tokens.values == tokens.keys &&
                      tokens.value_batch_stride == tokens.key_batch_stride &&
                      tokens.value_head_stride == tokens.key_head_stride &&
                      tokens.value_token_stride == tokens.key_token_stride;
  if (sides == 1 && !is_one) {
    throw std::invalid_argument(
        std::string(where) + ": values must be the keys where the cache has one side, got others");
  }
}

AttendArgs attend_args(int64_t layer, const Queries& query, float scale, void* output,
                       const CapAndSinks& terms, DType dtype) {
  if (!(terms.softcap >= 0) || !std::isfinite(terms.softcap)) {
    throw std::invalid_argument("attend: softcap must be finite and at least 0, got " +
                                std::to_string(terms.softcap));
  }
  // What is not attended is -inf before it is scaled.
  if (!(scale > 0) || !std::isfinite(scale)) {
    throw std::invalid_argument("attend: scale must be finite and above 0, got " +
                                std::to_string(scale));
  }
  if (output == nullptr) throw std::invalid_argument("attend: output must have a place, got none");
  return {.layer = layer,
          .query = query_view(query, dtype),
          .output = output,
          .scale = scale,
          .softcap = terms.softcap,
          .sinks = terms.sinks};
}

void check_received(Engine& engine, int64_t layer, int64_t numbers) {
  if (engine.exact_chunks().takes(layer)) {
    throw std::invalid_argument("attend: layer " + std::to_string(layer) +
                                " must attend in a step to tell what each token received, and the "
                                "pass is a prefill");
  }
  const int64_t wanted = engine.batch() * engine.options().kv_heads * engine.positions(layer);
  if (numbers == wanted) return;
  throw std::invalid_argument("attend: what each token received must be [batch, kv_heads, " +
                              std::to_string(engine.positions(layer)) + "], " +
                              std::to_string(wanted) + " numbers, got room for " +
                              std::to_string(numbers));
}

}  // namespace

Cache::Cache(const CacheOptions& options) {
  auto engine = Engine::create(engine_options(options), options.threads);
  throw_status(engine.status());
  impl_ = std::make_unique<Impl>(options, std::move(engine.value()));
}

Cache::Cache(const OpenArgs& args) : Cache(prepare(args)) {}

Cache::Cache(const Opening& opening) : Cache(opening.options) {
  for (size_t layer = 0; layer < opening.projections.size(); ++layer) {
    if (is_exact(opening.options.settings, static_cast<int64_t>(layer))) continue;
    set_projection(static_cast<int64_t>(layer), opening.projections[layer]);
  }
}

Cache::Cache(const SavedCache& saved, const CacheOptions& options)
    : impl_(std::make_unique<Impl>(options, open_engine(saved, options, options.threads))) {
  impl_->find_projections();
}

Cache::Cache(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Cache::~Cache() = default;

void Cache::save(const SaveArgs& args) {
  const Impl::Use use(*impl_);
  save_engine(use.engine(), impl_->options(), args);
}

std::unique_ptr<Cache> Cache::fork() {
  const Impl::Use use(*impl_);
  return std::unique_ptr<Cache>(new Cache(impl_->fork()));
}

void Cache::divide(const CacheOptions& options) try {
  const Impl::Use use(*impl_);
  impl_->divide(options);
} catch (const std::bad_alloc&) {
  impl_->ran_out_of_memory();
}

void Cache::begin_pass(Pass pass, const NewPositions& positions) try {
  const Impl::Use use(*impl_);
  throw_status(use.engine().begin_pass(pass));
  if (positions.valid == nullptr) return;
  throw_status(use.engine().declare(positions.batch, positions.tokens, positions.valid));
} catch (const std::bad_alloc&) {
  impl_->ran_out_of_memory();
}

void declare_held(Cache& cache, const HeldPositions& held) {
  const Cache::Impl::Use use(*cache.impl_);
  if (held.valid == nullptr) {
    throw std::invalid_argument("declare_held: valid must be given, got null");
  }
  throw_status(use.engine().given().take_validity(held.batch, held.positions, held.valid));
}

void give_tokens(Cache& cache, int64_t layer, const TokenChoice& choice) {
  const Cache::Impl::Use use(*cache.impl_);
  throw_status(use.engine().given().take_tokens(layer, choice.positions));
}

LookAhead Cache::wants_look_ahead(int64_t layer, int64_t tokens) const {
  const Impl::Use use(*impl_);
  Engine& engine = use.engine();
  const EngineOptions& options = engine.options();
  const std::vector<int64_t>& own = options.true_query_layers;
  const LookAheadMode mode = engine.context().look_ahead;
  if (mode == LookAheadMode::kOff || layer < 0 || layer >= options.layers ||
      std::find(own.begin(), own.end(), layer) != own.end() || engine.exact_chunks().takes(layer) ||
      tokens > options.select_queries_max ||
      engine.positions(layer) < options.tail_tokens + options.group_tokens) {
    return LookAhead::kNo;
  }
  if (engine.sequences().all_fit(layer)) return LookAhead::kAnyQuery;
  const bool pays =
      mode == LookAheadMode::kTrust || engine.context().adaptive_prefetch.predicts(layer);
  return pays ? LookAhead::kPredicted : LookAhead::kNo;
}

void Cache::look_ahead(int64_t layer, const Queries& query, const LookAheadTerms& terms) try {
  const Impl::Use use(*impl_);
  Engine& engine = use.engine(layer);
  const EngineOptions& options = engine.options();
  if (query.data != nullptr || !engine.sequences().all_fit(layer)) {
    check_look_ahead(query, options);
    if (engine.positions(layer) > 0) check_batch("look_ahead", query, engine.batch());
  }
  if (Timeline* timeline = engine.context().timeline.get();
      timeline != nullptr && terms.predicting_since_ns != 0) {
    timeline->record({.kind = SpanKind::kPredict,
                      .layer = layer,
                      .begin_ns = terms.predicting_since_ns,
                      .end_ns = Timeline::now_ns()});
  }
  throw_status(engine.look_ahead(layer, query_view(query, options.dtype), terms.scale,
                                 terms.predicting_since_ns));
} catch (const std::bad_alloc&) {
  impl_->ran_out_of_memory();
}

void Cache::give(int64_t layer, const GroupScores& given) try {
  const Impl::Use use(*impl_);
  Engine& engine = use.engine(layer);
  const int64_t parts = engine.sequences().size();
  const int64_t groups = engine.sequences().layer(layer).sealed_groups;
  if (static_cast<int64_t>(given.scores.size()) != parts * given.queries * groups) {
    throw std::invalid_argument("give_scores: scores must be [" + std::to_string(parts) + ", " +
                                std::to_string(given.queries) + ", " + std::to_string(groups) +
                                "], got " + std::to_string(given.scores.size()) + " numbers");
  }
  throw_status(
      engine.given().take_scores(layer, {given.scores.data(), parts, given.queries, groups}));
} catch (const std::bad_alloc&) {
  impl_->ran_out_of_memory();
}

void Cache::give(int64_t layer, const TokenImportance& given) try {
  const Impl::Use use(*impl_);
  Engine& engine = use.engine(layer);
  const int64_t parts = std::max<int64_t>(1, engine.sequences().size());
  const auto count = static_cast<int64_t>(given.worth.size());
  if (count % parts != 0 || (!given.decay.empty() && given.decay.size() != given.worth.size())) {
    throw std::invalid_argument("give_worth: worth must be [" + std::to_string(parts) +
                                ", tokens] and decay as much or empty, got " +
                                std::to_string(count) + " and " +
                                std::to_string(given.decay.size()) + " numbers");
  }
  const float* decay = given.decay.empty() ? nullptr : given.decay.data();
  const bool is_all = given.of == TokenImportance::Of::kAll;
  throw_status(engine.given().set_token_importance(
      layer, {.of = is_all ? TokenScores::Of::kAll : TokenScores::Of::kNewest,
              .importance = given.worth.data(),
              .decay = decay,
              .sequences = parts,
              .tokens = count / parts}));
} catch (const std::bad_alloc&) {
  impl_->ran_out_of_memory();
}

void Cache::give(int64_t layer, const GroupChoice& choice) try {
  const Impl::Use use(*impl_);
  // Numbers that no group can have stay such.
  const auto number = [](int64_t group) {
    return static_cast<int32_t>(
        std::clamp<int64_t>(group, -1, std::numeric_limits<int32_t>::max()));
  };
  const auto narrow = [&](const std::vector<std::vector<int64_t>>& wide) {
    std::vector<std::vector<int32_t>> all;
    for (const auto& groups : wide) {
      std::transform(groups.begin(), groups.end(), std::back_inserter(all.emplace_back()), number);
    }
    return all;
  };
  throw_status(
      use.engine().given().take_choice(layer, narrow(choice.groups), narrow(choice.predicted)));
} catch (const std::bad_alloc&) {
  impl_->ran_out_of_memory();
}

void Cache::append(int64_t layer, const NewTokens& tokens) try {
  const Impl::Use use(*impl_);
  check_tokens("append", tokens, impl_->options().shape.sides);
  throw_status(use.engine().append(layer, key_value_view(tokens)));
} catch (const std::bad_alloc&) {
  impl_->ran_out_of_memory();
}

void Cache::attend(int64_t layer, const Queries& query, float scale, void* output,
                   const CapAndSinks& terms, std::span<float> received) try {
  const Impl::Use use(*impl_);
  Engine& engine = use.engine(layer);
  check_heads("attend", query, engine.options());
  check_batch("attend", query, engine.batch());
  AttendArgs args = attend_args(layer, query, scale, output, terms, engine.options().dtype);
  if (!received.empty()) {
    check_received(engine, layer, std::ssize(received));
    args.received = received.data();
  }
  impl_->attend(args);
} catch (const std::bad_alloc&) {
  impl_->ran_out_of_memory();
}

void Cache::extend(int64_t layer, const NewTokens& tokens, const Queries& query, float scale,
                   void* output, const CapAndSinks& terms) try {
  const Impl::Use use(*impl_);
  Engine& engine = use.engine(layer);
  check_tokens("extend", tokens, impl_->options().shape.sides);
  check_heads("extend", query, engine.options());
  if (query.tokens != tokens.tokens || (query.batch != 0 && query.batch != tokens.batch)) {
    throw std::invalid_argument("extend: query must be of the " + std::to_string(tokens.batch) +
                                " x " + std::to_string(tokens.tokens) + " new tokens, got " +
                                std::to_string(query.batch) + " x " + std::to_string(query.tokens));
  }
  const AttendArgs args = attend_args(layer, query, scale, output, terms, engine.options().dtype);
  const KeyValueView added = key_value_view(tokens);
  ChunkedPrefill& chunks = engine.exact_chunks();
  if (!chunks.takes(layer)) {
    throw_status(engine.append(layer, added));
    impl_->attend(args);
    return;
  }
  throw_status(chunks.prepare(layer, tokens.batch, tokens.tokens));
  throw_status(attend_exactly(
      engine, {.attention = args, .past = engine.positions(layer), .own = added}, impl_->exact()));
  throw_status(engine.append(layer, added));
  chunks.end(layer, tokens.tokens);
} catch (const std::bad_alloc&) {
  impl_->ran_out_of_memory();
}

EstimateWanted Cache::wants_estimate(int64_t layer, int64_t tokens) const {
  const Impl::Use use(*impl_);
  Engine& engine = use.engine(layer);
  const EngineOptions& options = engine.options();
  // Rows that have no projection have no rank either.
  if (impl_->projection(layer).source != ProjectionSource::kNone || options.ranks.empty() ||
      engine.context().plan.is_exact(layer)) {
    return EstimateWanted::kNo;
  }
  // A few tokens say too little, whatever they are.
  if (!engine.exact_chunks().takes(layer) || tokens <= options.select_queries_max) {
    return EstimateWanted::kIfOutgrown;
  }
  const int64_t to_seal = engine.positions(layer) + tokens - options.tail_tokens;
  return to_seal / options.group_tokens > options.groups_max ? EstimateWanted::kFromChunk
                                                             : EstimateWanted::kNo;
}

void Cache::set_projection(int64_t layer, const Projection& projection,
                           ProjectionSource source) try {
  const Impl::Use use(*impl_);
  Engine& engine = use.engine(layer);
  const EngineOptions& options = engine.options();
  const int64_t width = options.kv_heads * options.head_dim;
  const auto size = static_cast<size_t>(width * projection.rank);
  if (projection.width != width || projection.rank < 1 || projection.keys.size() != size ||
      projection.queries.size() != size) {
    throw std::invalid_argument(
        "set_projection: both projections must be [" + std::to_string(width) + ", rank], got [" +
        std::to_string(projection.width) + ", " + std::to_string(projection.rank) + "]");
  }
  // Made from what is there, or from a chunk that is to come.
  const int64_t positions = engine.positions(layer) - (engine.needs_projection(layer) ? 1 : 0);
  throw_status(engine.set_projection(layer, projection.rank, projection.keys.data(),
                                     projection.queries.data()));
  impl_->projection(layer) = {source, positions};
} catch (const std::bad_alloc&) {
  impl_->ran_out_of_memory();
}

void Cache::read_back(int64_t layer, int64_t sequence, int64_t begin, int64_t end, void* keys,
                      void* values) {
  const Impl::Use use(*impl_);
  throw_status(use.engine().read_back(layer, sequence, begin, end, keys, values));
}

std::vector<std::vector<int64_t>> Cache::last_selection(int64_t layer) const {
  const Impl::Use use(*impl_);
  std::vector<std::vector<int64_t>> selection;
  for (const auto& groups : use.engine(layer).last_selection(layer)) {
    selection.emplace_back(groups.begin(), groups.end());
  }
  return selection;
}

void Cache::select_sequences(std::span<const int64_t> indices) try {
  const Impl::Use use(*impl_);
  throw_status(use.engine().select_sequences(indices));
} catch (const std::bad_alloc&) {
  impl_->ran_out_of_memory();
}

void Cache::crop(int64_t positions) try {
  const Impl::Use use(*impl_);
  throw_status(use.engine().crop(positions));
  impl_->forget_estimates(positions);
} catch (const std::bad_alloc&) {
  impl_->ran_out_of_memory();
}

void Cache::reset() try {
  const Impl::Use use(*impl_);
  throw_status(use.engine().reset());
  impl_->forget_estimates(0);
} catch (const std::bad_alloc&) {
  impl_->ran_out_of_memory();
}

void Cache::close() noexcept { impl_->close(); }

LayerState Cache::layer(int64_t layer, int64_t queries) const {
  const Impl::Use use(*impl_);
  Engine& engine = use.engine(layer);
  return {.positions = engine.positions(layer),
          .attends_exactly = engine.exact_chunks().takes(layer),
          .attends_all = engine.sequences().all_fit(layer),
          .needs_projection = engine.needs_projection(layer),
          .needs_scores = engine.given().needs_scores(layer, queries)};
}

Held Cache::held() const {
  const Impl::Use use(*impl_);
  const Engine& engine = use.engine();
  Held held = {.batch = engine.batch(), .positions = engine.positions(0)};
  for (int64_t layer = 1; layer < engine.options().layers; ++layer) {
    if (engine.positions(layer) != held.positions) held.positions = -1;
  }
  if (engine.context().unfinished_crop) held.positions = -1;
  return held;
}

bool Cache::has_padding(int64_t begin, int64_t end, bool* valid) const {
  const Impl::Use use(*impl_);
  if (begin < 0 || begin > end) {
    throw std::invalid_argument("has_padding: positions must rise from 0 or more, got " +
                                std::to_string(begin) + ".." + std::to_string(end));
  }
  const Engine& engine = use.engine();
  const int64_t apart = engine.context().options.heads_apart;
  bool is_found = false;
  for (int64_t sequence = 0; sequence < engine.batch(); ++sequence) {
    const PaddingMask& validity = engine.sequences().validity(sequence * apart);
    for (int64_t position = begin; position < end; ++position) {
      // What nobody declared counts.
      const bool is_valid = position >= validity.positions() || validity.is_valid(position);
      if (valid != nullptr) *valid++ = is_valid;
      is_found = is_found || !is_valid;
    }
  }
  return is_found;
}

const CacheOptions& Cache::options() const { return impl_->options(); }

Report Cache::report() const {
  const Impl::Use use(*impl_, true);
  const Engine& engine = use.engine();
  return {.counters = engine_counters(engine),
          .facts = engine_facts(engine),
          .ledger = engine_ledger(engine),
          .shape = impl_->options().shape,
          .batch = engine.batch(),
          .positions = engine.positions(0),
          .projections = impl_->best_projection(),
          .predictor_bytes = impl_->options().predictor_bytes};
}

std::string Cache::timeline() const {
  const Impl::Use use(*impl_);
  std::string trace;
  throw_status(engine_timeline(use.engine(), trace));
  return trace;
}

}  // namespace kvswap
