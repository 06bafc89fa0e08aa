#include "kvswap/engine_calls.h"

#include <cerrno>
#include <stdexcept>

#include "device/find_device.h"
#include "kvswap/errors.h"
#include "kvswap/swap_config.h"
#include "methods/summary/summary_encoder.h"

namespace kvswap {
namespace {

DType engine_dtype(ElementType type) {
  return type == ElementType::kFloat32    ? DType::kFloat32
         : type == ElementType::kBFloat16 ? DType::kBFloat16
                                          : DType::kFloat16;
}

}  // namespace

void throw_status(const Status& status) {
  using Kind = SessionError::Kind;
  switch (status.code()) {
    case StatusCode::kOk:
      return;
    case StatusCode::kInvalid:
      // A path that is not there is the caller's mistake and the world's: its errno says which.
      if (status.error_number() == 0) throw std::invalid_argument(status.message());
      throw SessionError(Kind::kStorage, status.message(), status.error_number(), status.path());
    case StatusCode::kBudget:
      throw SessionError(Kind::kBudget, status.message());
    case StatusCode::kStorage:
    case StatusCode::kLate:
      throw SessionError(Kind::kStorage, status.message(), status.error_number(), status.path());
    case StatusCode::kCorrupt:
      throw SessionError(Kind::kCorrupt, status.message(), status.error_number(), status.path());
    case StatusCode::kDropped:
      throw SessionError(Kind::kDropped, status.message());
    case StatusCode::kInterrupted:
      throw SessionError(status.error_number() == ECANCELED ? Kind::kClosed : Kind::kInterrupted,
                         status.message());
  }
}

EngineOptions engine_options(const CacheOptions& from) {
  EngineOptions to;
  static_cast<Settings&>(to) = from.settings;
  to.layers = from.shape.layers;
  to.query_heads = from.shape.heads;
  to.kv_heads = from.shape.kv_heads;
  to.head_dim = from.shape.head_dim;
  to.sides = from.shape.sides;
  to.value_dim = from.shape.value_dim;
  to.dtype = engine_dtype(from.shape.dtype);
  to.directory = from.directory;
  to.ranks = from.ranks;
  const SummaryKind* rows = SummaryKind::find(from.settings.rows);
  if (to.ranks.empty() && rows != nullptr && rows->takes_projections) {
    to.ranks = ranks_of(from.settings, from.shape.layers);
  }
  if (to.ranks.size() == 1) to.ranks.assign(from.shape.layers, to.ranks[0]);
  to.kv_memory_bytes = from.budget.kv_memory_bytes.value_or(-1);
  to.max_context = from.budget.max_context.value_or(-1);
  to.max_batch = from.budget.max_batch.value_or(-1);
  to.timeline_spans = from.timeline_spans;
  to.tells_attention = from.tells_attention;
  auto device = find_device(from.device);
  throw_status(device.status());
  to.device = std::move(device.value());
  return to;
}

QueryView query_view(const Queries& query, DType dtype) {
  return {.data = query.data,
          .batch_stride = query.batch_stride,
          .head_stride = query.head_stride,
          .query_stride = query.token_stride,
          .heads = query.heads,
          .queries = query.tokens,
          .dtype = dtype};
}

KeyValueView key_value_view(const NewTokens& tokens) {
  return {.keys = tokens.keys,
          .values = tokens.values,
          .key_batch_stride = tokens.key_batch_stride,
          .key_head_stride = tokens.key_head_stride,
          .key_token_stride = tokens.key_token_stride,
          .value_batch_stride = tokens.value_batch_stride,
          .value_head_stride = tokens.value_head_stride,
          .value_token_stride = tokens.value_token_stride,
          .batch = tokens.batch,
          .tokens = tokens.tokens};
}

}  // namespace kvswap
