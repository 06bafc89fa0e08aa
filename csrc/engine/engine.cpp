#include "engine/engine.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "engine/memory/memory_estimate.h"
#include "io/stopwatch.h"

namespace kvswap {

namespace {

/// What `args` ask, over pages that are described elsewhere.
PagedAttentionArgs asked(const AttendArgs& args, const EngineOptions& options,
                         const RecordShape& shape) {
  PagedAttentionArgs kernel;
  kernel.query = args.query.data;
  kernel.query_batch_stride = args.query.batch_stride;
  kernel.query_head_stride = args.query.head_stride;
  kernel.query_token_stride = args.query.query_stride;
  kernel.output = args.output;
  kernel.heads = options.query_heads;
  kernel.queries = args.query.queries;
  kernel.scale = args.scale;
  kernel.softcap = args.softcap;
  kernel.sinks = args.sinks;
  kernel.shape = shape;
  kernel.dtype = options.dtype;
  return kernel;
}

}  // namespace

Engine::Engine(const EngineOptions& options, std::unique_ptr<EngineContext> context)
    : options_(options),
      context_(std::move(context)),
      account_(*context_, memory_need),
      batch_(std::make_unique<Batch>(*context_, account_)),
      sealer_(*context_, *batch_, account_),
      past_(std::make_unique<PrefixReader>(*context_, *batch_, sealer_)),
      steps_(*context_, *batch_, sealer_),
      calls_(*context_, steps_),
      clustering_(*context_, *batch_, *past_),
      appender_(*context_, *batch_, sealer_, account_, steps_, clustering_),
      editor_(*context_, *batch_, sealer_, *past_, account_, steps_),
      saver_(calls_, *context_, *batch_, sealer_, *past_, steps_, appender_, clustering_),
      loader_(calls_, *context_, *batch_, editor_, account_, steps_),
      table_(*context_, *batch_),
      audit_(*context_, *batch_, sealer_),
      retention_(*context_, *batch_, sealer_, *past_),
      exact_chunks_(calls_, *context_, *batch_, *past_, steps_, appender_, retention_),
      given_(calls_, *context_, *batch_, steps_, exact_chunks_, retention_.given(), table_),
      page_scores_(*context_, *batch_) {}

Engine::~Engine() {
  if (calls_.is_own_process()) {
    // Pages go only when nothing lands there any more.
    context_->patience.wait_for_all();
    context_->store->writes().forget();
    steps_.drain();
    // Errors were reported by the calls before this one.
    (void)steps_.drop_all().is_ok();
    (void)sealer_.drain().is_ok();
    return;
  }
  // A forked child has neither the pages nor a device and its threads: leave all of it alone.
  (void)past_.release();
  sealer_.leave_memory();
  (void)batch_.release();
  (void)context_->selector.release();
  (void)context_->space.release();
}

Result<std::unique_ptr<Engine>> Engine::create(const EngineOptions& options, ParallelFor parallel) {
  KVSWAP_RETURN_IF_ERROR(options.validate());
  KVSWAP_RETURN_IF_ERROR(options.check_place());
  auto context = EngineContext::open(options, std::move(parallel));
  if (!context.is_ok()) return context.status();
  std::unique_ptr<Engine> engine(new Engine(options, std::move(context.value())));
  const EngineOptions& apart = engine->context_->options;
  KVSWAP_RETURN_IF_ERROR(engine->account_.charge_fixed());
  if (apart.max_context > 0 && apart.max_batch > 0) {
    KVSWAP_RETURN_IF_ERROR(engine->account_.check_room({apart.max_batch, apart.max_context}));
  }
  return engine;
}

Status Engine::begin_pass(Pass pass) {
  KVSWAP_RETURN_IF_ERROR(calls_.check());
  appender_.begin(pass);
  return Status::ok();
}

Status Engine::declare(int64_t batch, int64_t tokens, const bool* valid) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter());
  if (batch < 1 || tokens < 0) {
    return Status::invalid("declare: the mask must be of a batch of tokens, got " +
                           std::to_string(batch) + " x " + std::to_string(tokens));
  }
  if (batch_->size() == 0) {
    KVSWAP_RETURN_IF_ERROR(batch_->begin(batch * context_->options.heads_apart, tokens));
  }
  if (batch != this->batch()) {
    return Status::invalid("declare: the mask must be for the session's batch of " +
                           std::to_string(this->batch()) + ", got " + std::to_string(batch));
  }
  batch_->declare(tokens, valid);
  return Status::ok();
}

Status Engine::append(int64_t layer, const KeyValueView& tokens) {
  const Stopwatch watch(context_->timeline.get(), {.kind = SpanKind::kAppend, .layer = layer},
                        &context_->counters.append_seconds);
  KVSWAP_RETURN_IF_ERROR(calls_.enter_step(layer));
  KVSWAP_RETURN_IF_ERROR(exact_chunks_.begin(layer));
  KeyValueView split = tokens;
  split.heads_apart = context_->options.heads_apart;
  split.batch = tokens.batch * split.heads_apart;
  return calls_.leave(appender_.append(layer, split));
}

Status Engine::read_back(int64_t layer, int64_t sequence, int64_t begin, int64_t end, void* keys,
                         void* values) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter(layer));
  const RecordShape& shape = context_->plan.record_shape;
  const int64_t rows_bytes = std::max<int64_t>(0, end - begin) * shape.element_bytes;
  const int64_t apart = context_->options.heads_apart;
  for (int64_t head = 0; head < apart; ++head) {
    KVSWAP_RETURN_IF_ERROR(
        past_->read({layer, sequence * apart + head, begin, end},
                    static_cast<std::byte*>(keys) + head * shape.head_dim * rows_bytes,
                    static_cast<std::byte*>(values) + head * shape.value_width() * rows_bytes));
  }
  return Status::ok();
}

bool Engine::needs_projection(int64_t layer) const {
  return context_->plan.selects && !context_->selector->is_ready(layer) &&
         !context_->plan.is_exact(layer) && !batch_->all_fit(layer);
}

Status Engine::look_ahead(int64_t layer, const QueryView& query, std::optional<float> scale,
                          int64_t since_ns) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter(layer));
  if (context_->look_ahead == LookAheadMode::kOff) return Status::ok();
  KVSWAP_RETURN_IF_ERROR(steps_.drop(layer));
  if (batch_->layer(layer).sealed_groups == 0 || query.queries < 1 || exact_chunks_.takes(layer) ||
      needs_projection(layer)) {
    return Status::ok();
  }
  KVSWAP_RETURN_IF_ERROR(appender_.check_length("look_ahead", query.queries));
  KVSWAP_RETURN_IF_ERROR(clustering_.catch_up(layer));
  KVSWAP_RETURN_IF_ERROR(retention_.refresh(layer, positions(layer)));
  const float usual = 1.0f / std::sqrt(static_cast<float>(options().head_dim));
  const AttentionQuery question = {.query = query.of_parts(context_->options.heads_apart),
                                   .scale = scale.value_or(usual),
                                   .since_ns = since_ns};
  return calls_.leave(steps_.look_ahead(layer, question));
}

const std::vector<std::vector<int32_t>>& Engine::last_selection(int64_t layer) {
  steps_.drain();
  return steps_.of(layer).chosen();
}

Status Engine::attend(const AttendArgs& args) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter_step(args.layer));
  const int64_t queries = args.query.queries;
  const int64_t held = positions(args.layer);
  if (exact_chunks_.takes(args.layer)) {
    return Status::invalid(
        "attend: layer " + std::to_string(args.layer) + " must attend exactly, since " +
        (batch_->is_restored(args.layer) ? "it never chooses" : "the pass is a prefill"));
  }
  KVSWAP_RETURN_IF_ERROR(appender_.check_length("attend", queries));
  if (queries < 1 || queries > held) {
    return Status::invalid(
        "attend: queries must be at least 1 and at most the positions appended (" +
        std::to_string(held) + "), got " + std::to_string(queries));
  }
  if (args.received != nullptr) KVSWAP_RETURN_IF_ERROR(retention_.check_tells(args.layer));
  LayerStep& step = steps_.of(args.layer);
  if (step.state() != LayerStep::State::kFailed && !step.is_for(queries)) {
    if (step.state() != LayerStep::State::kIdle) KVSWAP_RETURN_IF_ERROR(step.drop());
    KVSWAP_RETURN_IF_ERROR(clustering_.catch_up(args.layer));
    KVSWAP_RETURN_IF_ERROR(retention_.refresh(args.layer, held - queries));
  }
  KVSWAP_RETURN_IF_ERROR(steps_.take(
      args.layer,
      {.query = args.query.of_parts(context_->options.heads_apart), .scale = args.scale}));
  KVSWAP_RETURN_IF_ERROR(audit_.begin(args.layer, step, queries));
  table_.build(args.layer, queries, step);
  PagedAttentionArgs kernel = asked(args, options(), context_->plan.record_shape);
  table_.describe(kernel);
  // One serves all.
  for (float* wanted : {page_scores_.log_sum_exp(queries),
                        retention_.log_sum_exp(args.layer, queries), audit_.log_sum_exp()}) {
    if (wanted != nullptr) kernel.log_sum_exp = wanted;
  }
  {
    const Stopwatch watch(context_->timeline.get(),
                          {.kind = SpanKind::kAttend, .layer = args.layer},
                          &context_->counters.attend_seconds);
    context_->space->compute().attend(args.layer, kernel);
  }
  Status finished = audit_.finish(kernel);
  Status observed = retention_.observe_step(args.layer, kernel);
  if (observed.is_ok() && args.received != nullptr) {
    observed = retention_.tell_step(args.layer, kernel, args.received);
  }
  if (observed.is_ok()) observed = page_scores_.rate(step, args.layer, kernel);
  if (finished.is_ok()) finished = std::move(observed);
  if (finished.is_ok()) finished = sealer_.seal_overflow(args.layer);
  if (finished.is_ok()) finished = clustering_.catch_up(args.layer);
  if (finished.is_ok()) retention_.eviction().discard_prefix(args.layer);
  return calls_.leave(std::move(finished));
}

Status Engine::set_projection(int64_t layer, int64_t rank, const float* keys,
                              const float* queries) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter(layer));
  appender_.forget();
  return editor_.set_projection(layer, rank, keys, queries);
}

Status Engine::select_sequences(std::span<const int64_t> indices) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter());
  appender_.forget();
  const int64_t apart = context_->options.heads_apart;
  std::vector<int64_t> split;
  for (const int64_t index : indices) {
    for (int64_t head = 0; head < apart; ++head) split.push_back(index * apart + head);
  }
  return editor_.select_sequences(split);
}

Status Engine::read_all() {
  KVSWAP_RETURN_IF_ERROR(calls_.enter());
  appender_.forget();
  return editor_.read_all();
}

Status Engine::crop(int64_t positions) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter_crop());
  appender_.forget();
  return editor_.crop(positions);
}

Status Engine::reset() {
  KVSWAP_RETURN_IF_ERROR(calls_.enter_crop());
  KVSWAP_RETURN_IF_ERROR(steps_.drop_all());
  // Errors of it are forgotten with all the rest.
  (void)sealer_.drain().is_ok();
  appender_.begin(Pass::kPrefill);
  batch_->clear();
  context_->unfinished_crop.reset();
  steps_.forget_choices();
  context_->selector->forget_scores();
  account_.release_scores();
  account_.drain(*batch_);
  return Status::ok();
}

}  // namespace kvswap
