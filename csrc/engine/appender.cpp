#include "engine/appender.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kvswap {

Status Appender::check_length(const char* where, int64_t tokens) const {
  const int64_t most = context_.options.select_queries_max;
  if (pass_ == Pass::kPrefill || tokens <= most) return Status::ok();
  return Status::invalid(std::string(where) +
                         ": a decode pass must be of at most selection.max_step_tokens (" +
                         std::to_string(most) + ") tokens, got " + std::to_string(tokens) +
                         "; begin_pass() as a prefill attends exactly");
}

Status Appender::check(int64_t layer, int64_t batch, int64_t tokens) {
  if (tokens < 1) {
    return Status::invalid("append: tokens must be at least 1, got " + std::to_string(tokens));
  }
  KVSWAP_RETURN_IF_ERROR(check_length("append", tokens));
  KVSWAP_RETURN_IF_ERROR(check_positions(batch_.layer(layer).positions + tokens));
  if (batch_.size() == 0) return batch_.begin(batch, tokens);
  if (batch != batch_.size()) {
    const int64_t apart = context_.options.heads_apart;
    return Status::invalid("append: batch must stay " + std::to_string(batch_.size() / apart) +
                           " for the life of the cache's contents, got " +
                           std::to_string(batch / apart) + "; reset() the cache first");
  }
  return Status::ok();
}

Status Appender::check_positions(int64_t positions) const {
  const int64_t context_max = context_.options.max_context;
  // One that is promised was checked when it was.
  if (context_max <= 0) {
    if (positions <= context_.plan.context_max) return Status::ok();
    return check_context(context_.options, positions);
  }
  if (positions > context_max) {
    return Status::budget("append: the context must stay within max_context (" +
                          std::to_string(context_max) + " tokens), got " +
                          std::to_string(positions) + "; open the cache with a larger one");
  }
  return Status::ok();
}

Status Appender::prepare(int64_t layer, int64_t batch, int64_t tokens) {
  forget();
  KVSWAP_RETURN_IF_ERROR(check(layer, batch, tokens));
  if (is_exact(layer)) {
    KVSWAP_RETURN_IF_ERROR(steps_.drop(layer));
  } else {
    // Left over when nobody attended after the last append().
    const int64_t sealed = batch_.layer(layer).sealed_groups;
    KVSWAP_RETURN_IF_ERROR(sealer_.seal_overflow(layer));
    if (batch_.layer(layer).sealed_groups != sealed) KVSWAP_RETURN_IF_ERROR(steps_.drop(layer));
  }
  if (clustering_.needs_catch_up(layer)) {
    KVSWAP_RETURN_IF_ERROR(steps_.drop(layer));
    KVSWAP_RETURN_IF_ERROR(clustering_.catch_up(layer));
  }
  const int64_t positions = batch_.layer(layer).positions + tokens;
  KVSWAP_RETURN_IF_ERROR(account_.charge_growth(batch_, layer, positions));
  batch_.declare_valid(positions);
  context_.space->compute().mark_tokens();
  prepared_ = layer;
  prepared_tokens_ = tokens;
  return Status::ok();
}

void Appender::forget() {
  if (std::exchange(prepared_, -1) >= 0) account_.drain(batch_);
}

Status Appender::append(int64_t layer, const KeyValueView& tokens) {
  const bool is_prepared = prepared_ == layer && tokens.batch == batch_.size() &&
                           tokens.tokens == prepared_tokens_ && is_exact(layer);
  if (!is_prepared) KVSWAP_RETURN_IF_ERROR(prepare(layer, tokens.batch, tokens.tokens));
  prepared_ = -1;
  Batch::Layer& state = batch_.layer(layer);
  if (!is_exact(layer)) {
    fill_tail(context_, batch_, layer, tokens,
              {.count = tokens.tokens, .first_position = state.positions});
    batch_.grow(layer, state.positions + tokens.tokens);
    return Status::ok();
  }
  const int64_t sealed = state.sealed_groups;
  context_.space->compute().begin_chunk();
  const Status appended = append_chunk(layer, tokens);
  context_.space->compute().end_chunk();
  if (!appended.is_ok()) sealer_.roll_back(layer, sealed);
  if (appended.is_ok() && pass_ == Pass::kPrefill) state.prefilled = state.positions;
  return appended;
}

Status Appender::append_chunk(int64_t layer, const KeyValueView& tokens) {
  Batch::Layer& state = batch_.layer(layer);
  const int64_t group_tokens = context_.options.group_tokens;
  const int64_t positions = state.positions + tokens.tokens;
  const int64_t groups_after = context_.options.sealed_groups(positions);

  // Complete the tail's last group, so that the rest of the chunk begins at a group's edge.
  const int64_t to_edge = (group_tokens - state.positions % group_tokens) % group_tokens;
  int64_t done = std::min(to_edge, tokens.tokens);
  fill_tail(context_, batch_, layer, tokens, {.count = done, .first_position = state.positions});
  const int64_t first_direct = (state.positions + done) / group_tokens;
  while (state.sealed_groups < std::min(groups_after, first_direct)) {
    KVSWAP_RETURN_IF_ERROR(sealer_.seal_from_tail(layer));
  }
  if (groups_after > first_direct) {
    const int64_t groups = groups_after - first_direct;
    KVSWAP_RETURN_IF_ERROR(sealer_.seal_directly(layer, tokens, done, groups));
    done += groups * group_tokens;
  }
  KVSWAP_RETURN_IF_ERROR(clustering_.enter_chunk(layer, tokens, state.positions));
  fill_tail(context_, batch_, layer, tokens,
            {.first_token = done,
             .count = tokens.tokens - done,
             .first_position = state.positions + done});
  batch_.grow(layer, positions);
  return Status::ok();
}

}  // namespace kvswap
