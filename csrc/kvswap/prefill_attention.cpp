#include "kvswap/prefill_attention.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "io/stopwatch.h"

namespace kvswap {
namespace {

/// The chunk's own keys and values, read back: [batch, kv_heads, tokens, head_dim] and [batch,
/// kv_heads, tokens, value_width()].
class OwnTokens {
 public:
  OwnTokens(const EngineOptions& options, int64_t batch, int64_t tokens)
      : batch_(batch),
        tokens_(tokens),
        heads_(options.kv_heads),
        head_dim_(options.head_dim),
        value_width_(options.record_shape().value_width()),
        number_bytes_(heads_ * tokens * dtype_bytes(options.dtype)),
        keys_(batch * head_dim_ * number_bytes_),
        values_(batch * value_width_ * number_bytes_) {}

  Status read(Engine& engine, int64_t layer, int64_t begin) {
    for (int64_t sequence = 0; sequence < batch_; ++sequence) {
      const int64_t at = sequence * number_bytes_;
      KVSWAP_RETURN_IF_ERROR(engine.read_back(layer, sequence, begin, begin + tokens_,
                                              keys_.data() + at * head_dim_,
                                              values_.data() + at * value_width_));
    }
    return Status::ok();
  }
  KeyValueView view() const {
    return {.keys = keys_.data(),
            .values = values_.data(),
            .key_batch_stride = heads_ * tokens_ * head_dim_,
            .key_head_stride = tokens_ * head_dim_,
            .key_token_stride = head_dim_,
            .value_batch_stride = heads_ * tokens_ * value_width_,
            .value_head_stride = tokens_ * value_width_,
            .value_token_stride = value_width_,
            .batch = batch_,
            .tokens = tokens_};
  }

 private:
  int64_t batch_;
  int64_t tokens_;
  int64_t heads_;
  int64_t head_dim_;
  int64_t value_width_;
  int64_t number_bytes_;  // of one number of each head and token of a sequence
  std::vector<std::byte> keys_;
  std::vector<std::byte> values_;
};

/// Nothing is before the chunk, all of it counts, and only its output is wanted.
bool is_alone(Engine& engine, const ExactArgs& args) {
  const AttendArgs& attention = args.attention;
  if (args.past > 0 || attention.softcap != 0 || attention.sinks != nullptr ||
      engine.retention().window(attention.layer) > 0) {
    return false;
  }
  for (int64_t part = 0; part < engine.sequences().size(); ++part) {
    if (engine.sequences().validity(part).all_valid_from() > 0) return false;
  }
  return true;
}

Status attend_part(Engine& engine, const ExactArgs& args, int64_t part, ExactChunk& chunk) {
  const int64_t layer = args.attention.layer;
  const int64_t tokens = args.attention.query.queries;
  const int64_t begin =
      std::clamp<int64_t>(engine.sequences().validity(part).first_valid() - args.past, 0, tokens);
  if (begin == tokens) return Status::ok();
  const std::unique_ptr<ExactPart> attending = chunk.part(part, begin);
  KVSWAP_RETURN_IF_ERROR(engine.exact_chunks().walk({layer, part, args.past}, *attending));
  if (args.attention.sinks != nullptr) attending->add_sinks();
  const int64_t observed = engine.retention().window(layer);
  if (observed > 0) engine.retention().observe_chunk(layer, part, attending->window(observed));
  attending->write();
  return Status::ok();
}

Status attend_chunk(Engine& engine, const ExactArgs& args, ExactChunk& chunk) {
  if (is_alone(engine, args) && chunk.attend_alone()) return Status::ok();
  chunk.clear();
  for (int64_t part = 0; part < engine.sequences().size(); ++part) {
    KVSWAP_RETURN_IF_ERROR(attend_part(engine, args, part, chunk));
  }
  return Status::ok();
}

}  // namespace

Status attend_exactly(Engine& engine, const ExactArgs& args, const ExactAttention& how) {
  const int64_t layer = args.attention.layer;
  const int64_t tokens = args.attention.query.queries;
  const Stopwatch watch(engine.context().timeline.get(),
                        {.kind = SpanKind::kAttendExactly, .layer = layer});
  engine.exact_chunks().count(layer);
  ExactArgs whole = args;
  std::optional<OwnTokens> own;
  if (args.own.keys == nullptr) {
    own.emplace(engine.options(), engine.batch(), tokens);
    KVSWAP_RETURN_IF_ERROR(own->read(engine, layer, args.past));
    whole.own = own->view();
    whole.is_own_host = true;
  }
  auto chunk = how.begin(engine, whole);
  if (!chunk.is_ok()) return chunk.status();
  KVSWAP_RETURN_IF_ERROR(attend_chunk(engine, whole, *chunk.value()));
  KVSWAP_RETURN_IF_ERROR(chunk.value()->finish());
  // Else who appends the chunk does this.
  if (engine.positions(layer) > args.past) engine.exact_chunks().end(layer, tokens);
  return Status::ok();
}

}  // namespace kvswap
