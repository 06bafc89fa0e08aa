#include "torch/tensor_cache.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "io/timeline.h"
#include "torch/element_type.h"
#include "torch/expanded_attention.h"
#include "torch/op_checks.h"
#include "torch/parallel.h"
#include "torch/projection.h"
#include "torch/torch_device.h"
#include "torch/torch_prefill_attention.h"

namespace kvswap {
namespace {

constexpr int64_t kKeysReadBack = 2048;  // newest keys that a late estimate looks at

/// What the torch-free part calls an invalid argument is a c10::ValueError here.
template <typename Call>
auto with_value_errors(const Call& call) {
  try {
    return call();
  } catch (const ConfigError&) {
    throw;
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

/// With torch's threads, stream and attention.
CacheOptions over_tensors(CacheOptions options) {
  const at::Device device = tensor_device(options.device);
  options.threads = device.is_cuda() ? few_threads_for() : at_parallel_for();
  if (device.is_cuda()) options.stream = [device] { return current_stream(device); };
  options.exact = torch_exact_attention(device);
  return options;
}

Opening over_tensors(Opening opening) {
  opening.options = over_tensors(std::move(opening.options));
  return opening;
}

Estimate usual_estimate(const Settings& settings) {
  const EstimateOptions options = {
      .kind = settings.projection_kind, .score = settings.score, .heads = settings.heads};
  return [options](const EstimateFrom& from) { return estimate_projection(from, options); };
}

/// With a contiguous last dimension, and aligned as kernels of a device want it.
at::Tensor plain(const at::Tensor& tensor) {
  const bool is_aligned =
      tensor.is_cpu() || reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  if (tensor.stride(3) == 1 && is_aligned) return tensor;
  return tensor.clone(at::MemoryFormat::Contiguous);
}

NewTokens tokens_of(const at::Tensor& keys, const at::Tensor& values) {
  return {.keys = keys.data_ptr(),
          .values = values.data_ptr(),
          .batch = keys.size(0),
          .tokens = keys.size(2),
          .key_batch_stride = keys.stride(0),
          .key_head_stride = keys.stride(1),
          .key_token_stride = keys.stride(2),
          .value_batch_stride = values.stride(0),
          .value_head_stride = values.stride(1),
          .value_token_stride = values.stride(2)};
}

Queries queries_of(const at::Tensor& query) {
  return {.data = query.data_ptr(),
          .batch = query.size(0),
          .heads = query.size(1),
          .tokens = query.size(2),
          .batch_stride = query.stride(0),
          .head_stride = query.stride(1),
          .token_stride = query.stride(2)};
}

std::optional<float> narrow(std::optional<double> scale) {
  return scale ? std::optional(static_cast<float>(*scale)) : std::nullopt;
}

/// sinks: contiguous, or undefined.
CapAndSinks terms_of(const ScoreTerms& terms, const at::Tensor& sinks) {
  return {.softcap = static_cast<float>(terms.softcap),
          .sinks = sinks.defined() ? sinks.data_ptr<float>() : nullptr};
}

std::vector<float> numbers_of(const at::Tensor& matrix) {
  const at::Tensor plain = matrix.to(at::kCPU, at::kFloat).contiguous();
  const auto* first = plain.data_ptr<float>();
  return {first, first + plain.numel()};
}

/// On the host.
at::Tensor packed_flags(const char* where, const at::Tensor& valid) {
  TORCH_CHECK_VALUE(valid.dim() == 2 && valid.scalar_type() == at::kBool, where,
                    ": valid must be a [batch, tokens] bool tensor, got ", valid.sizes(), " of ",
                    valid.scalar_type());
  return valid.to(at::kCPU).contiguous();
}

std::span<const float> span_of(const at::Tensor& tensor) {
  return {tensor.data_ptr<float>(), static_cast<size_t>(tensor.numel())};
}

void check_expanded(const char* where, const ExpandedQueries& queries, const at::Tensor& keys,
                    const ModelShape& shape) {
  const at::Tensor& query = queries.query;
  const at::Tensor& weight = queries.weight;
  TORCH_CHECK_VALUE(shape.sides == 1 && shape.kv_heads == 1 && query.is_cpu(), where,
                    ": must be of latents on the CPU (sides=1), got sides=", shape.sides, " on ",
                    query.device());
  TORCH_CHECK_VALUE(weight.dim() == 3 && weight.size(0) == shape.heads && queries.unrotated >= 0 &&
                        queries.value_dim() >= 1 && weight.size(2) <= shape.head_dim,
                    where, ": weight must be [", shape.heads, ", ", queries.unrotated,
                    " + value, rank], got ", weight.sizes());
  const int64_t width = queries.unrotated + shape.head_dim - queries.rank();
  TORCH_CHECK_VALUE(query.dim() == 4 && query.size(0) == keys.size(0) &&
                        query.size(1) == shape.heads && query.size(2) == keys.size(2) &&
                        query.size(3) == width,
                    where, ": query must be [", keys.size(0), ", ", shape.heads, ", ", keys.size(2),
                    ", ", width, "], got ", query.sizes());
  for (const at::Tensor& each : {query, weight}) {
    TORCH_CHECK_VALUE(each.scalar_type() == keys.scalar_type() && each.device() == keys.device(),
                      where, ": query and weight must have the keys' dtype and device, got ",
                      each.scalar_type(), " on ", each.device());
  }
}

}  // namespace

TensorCache::TensorCache(std::unique_ptr<Cache> cache)
    : cache_(std::move(cache)),
      estimate_(usual_estimate(cache_->options().settings)),
      device_(tensor_device(cache_->options().device)) {}

TensorCache::TensorCache(const CacheOptions& options)
    : TensorCache(
          with_value_errors([&] { return std::make_unique<Cache>(over_tensors(options)); })) {}

TensorCache::TensorCache(const OpenArgs& args)
    : TensorCache(
          with_value_errors([&] { return std::make_unique<Cache>(over_tensors(prepare(args))); })) {
}

TensorCache::TensorCache(const SavedCache& saved, const CacheOptions& options)
    : TensorCache(with_value_errors(
          [&] { return std::make_unique<Cache>(saved, over_tensors(options)); })) {}

std::unique_ptr<TensorCache> TensorCache::fork() {
  std::unique_ptr<TensorCache> forked(
      new TensorCache(with_value_errors([&] { return cache_->fork(); })));
  forked->estimate_ = estimate_;
  return forked;
}

/// [batch, heads, tokens, width] on the cache's device and of its dtype.
void TensorCache::check(const char* where, const char* name, const at::Tensor& tensor,
                        int64_t heads, int64_t width) const {
  const ModelShape& shape = cache_->options().shape;
  TORCH_CHECK_VALUE(tensor.device() == device_, where, ": ", name,
                    " must be on the session's device, ", device_, ", got ", tensor.device());
  TORCH_CHECK_VALUE(tensor.dim() == 4 && tensor.size(1) == heads && tensor.size(3) == width, where,
                    ": ", name, " must be [batch, ", heads, ", tokens, ", width, "], got ",
                    tensor.sizes());
  TORCH_CHECK_VALUE(element_type(tensor.scalar_type()) == shape.dtype, where, ": ", name,
                    " must have the session's dtype, got ", tensor.scalar_type());
}

void TensorCache::check_new(const char* where, const at::Tensor& keys,
                            const at::Tensor& values) const {
  const ModelShape& shape = cache_->options().shape;
  check(where, "keys", keys, shape.kv_heads, shape.head_dim);
  check(where, "values", values, shape.kv_heads, shape.value_width());
  TORCH_CHECK_VALUE(keys.size(0) == values.size(0) && keys.size(2) == values.size(2), where,
                    ": keys and values must have one shape, got ", keys.sizes(), " and ",
                    values.sizes());
}

at::Tensor TensorCache::output_for(const at::Tensor& query) const {
  return at::empty(
      {query.size(0), query.size(2), query.size(1), cache_->options().shape.value_width()},
      query.options());
}

void TensorCache::declare_held(const at::Tensor& valid) {
  const at::Tensor packed = packed_flags("declare_held", valid);
  const HeldPositions held = {packed.size(0), packed.size(1), packed.data_ptr<bool>()};
  with_value_errors([&] { kvswap::declare_held(*cache_, held); });
}

void TensorCache::begin_pass(Pass pass, const std::optional<at::Tensor>& valid) {
  NewPositions positions;
  at::Tensor packed;
  if (valid) {
    packed = packed_flags("begin_pass", *valid);
    positions = {packed.size(0), packed.size(1), packed.data_ptr<bool>()};
  }
  with_value_errors([&] { cache_->begin_pass(pass, positions); });
}

void TensorCache::look_ahead(int64_t layer, const at::Tensor& query, std::optional<double> scale,
                             int64_t predicting_since_ns) {
  const ModelShape& shape = cache_->options().shape;
  const bool is_summed = query.dim() == 4 && query.size(1) == shape.kv_heads;
  check("look_ahead", "query", query, is_summed ? shape.kv_heads : shape.heads, shape.head_dim);
  const at::Tensor packed = plain(query);
  const LookAheadTerms terms = {.scale = narrow(scale), .predicting_since_ns = predicting_since_ns};
  with_value_errors([&] { cache_->look_ahead(layer, queries_of(packed), terms); });
}

void TensorCache::look_ahead(int64_t layer, int64_t tokens,
                             const std::function<at::Tensor()>& predict,
                             std::optional<double> scale) {
  const LookAhead wanted = cache_->wants_look_ahead(layer, tokens);
  if (wanted == LookAhead::kNo) return;
  if (wanted == LookAhead::kAnyQuery) {
    with_value_errors([&] { cache_->look_ahead(layer, {.tokens = tokens}); });
    return;
  }
  const int64_t began_ns = Timeline::now_ns();
  const at::Tensor query = predict();
  look_ahead(layer, query, scale, began_ns);
}

void TensorCache::give_scores(int64_t layer, const at::Tensor& scores) {
  const at::Tensor packed = host_numbers("give_scores: scores", scores, 3);
  with_value_errors([&] {
    cache_->give(layer, GroupScores{.scores = span_of(packed), .queries = packed.size(1)});
  });
}

void TensorCache::give_worth(int64_t layer, const at::Tensor& worth,
                             const std::optional<at::Tensor>& decay, TokenImportance::Of of) {
  const at::Tensor packed = host_numbers("give_worth: worth", worth, 2);
  at::Tensor lost;
  TokenImportance given = {.worth = span_of(packed), .of = of};
  if (decay) {
    lost = host_numbers("give_worth: decay", *decay, 2);
    TORCH_CHECK_VALUE(lost.sizes() == packed.sizes(), "give_worth: decay must be as worth, ",
                      packed.sizes(), ", got ", lost.sizes());
    given.decay = span_of(lost);
  }
  with_value_errors([&] { cache_->give(layer, given); });
}

void TensorCache::append(int64_t layer, const at::Tensor& keys, const at::Tensor& values) {
  check_new("append", keys, values);
  const at::Tensor k = plain(keys);
  const at::Tensor v = plain(values);
  with_value_errors([&] { cache_->append(layer, tokens_of(k, v)); });
}

at::Tensor TensorCache::attend(int64_t layer, const at::Tensor& query, double scale,
                               const ScoreTerms& terms) {
  return attend_into(layer, query, scale, terms, {});
}

std::pair<at::Tensor, at::Tensor> TensorCache::attend_weighed(int64_t layer,
                                                              const at::Tensor& query, double scale,
                                                              const ScoreTerms& terms) {
  if (cache_->layer(layer).needs_projection) estimate_late(layer);
  const Held held = cache_->held();
  at::Tensor received =
      at::empty({held.batch, cache_->options().shape.kv_heads, cache_->layer(layer).positions},
                at::TensorOptions().dtype(at::kFloat));
  at::Tensor output =
      attend_into(layer, query, scale, terms,
                  {received.data_ptr<float>(), static_cast<size_t>(received.numel())});
  return {std::move(output), std::move(received)};
}

at::Tensor TensorCache::attend_into(int64_t layer, const at::Tensor& query, double scale,
                                    const ScoreTerms& terms, std::span<float> received) {
  const at::NoGradGuard no_grad;
  const ModelShape& shape = cache_->options().shape;
  check("attend", "query", query, shape.heads, shape.head_dim);
  const at::Tensor sinks = contiguous_sinks("attend", terms.sinks, query);
  const at::Tensor packed = plain(query);
  at::Tensor output = output_for(query);
  with_value_errors([&] {
    cache_->attend(layer, queries_of(packed), static_cast<float>(scale), output.data_ptr(),
                   terms_of(terms, sinks), received);
  });
  return output;
}

at::Tensor TensorCache::extend(int64_t layer, const at::Tensor& query, const at::Tensor& keys,
                               const at::Tensor& values, double scale, const ScoreTerms& terms) {
  const at::NoGradGuard no_grad;
  check_new("extend", keys, values);
  const ModelShape& shape = cache_->options().shape;
  check("extend", "query", query, shape.heads, shape.head_dim);
  const at::Tensor sinks = contiguous_sinks("extend", terms.sinks, query);
  TORCH_CHECK_VALUE(query.size(0) == keys.size(0) && query.size(2) == keys.size(2),
                    "extend: query, keys and values must have one batch and length, got ",
                    query.sizes(), " and ", keys.sizes());
  const at::Tensor q = plain(query);
  const at::Tensor k = plain(keys);
  const at::Tensor v = plain(values);
  const int64_t tokens = k.size(2);
  const EstimateWanted wanted =
      with_value_errors([&] { return cache_->wants_estimate(layer, tokens); });
  if (wanted == EstimateWanted::kIfOutgrown) {
    with_value_errors([&] { cache_->append(layer, tokens_of(k, v)); });
    if (cache_->layer(layer).needs_projection) estimate_late(layer);
    return attend(layer, q, scale, terms);
  }
  if (wanted == EstimateWanted::kFromChunk) {
    estimate(layer, cache_->layer(layer).positions, k, query);
  }
  at::Tensor output = output_for(query);
  with_value_errors([&] {
    cache_->extend(layer, tokens_of(k, v), queries_of(q), static_cast<float>(scale),
                   output.data_ptr(), terms_of(terms, sinks));
  });
  return output;
}

at::Tensor TensorCache::extend_expanded(int64_t layer, const ExpandedQueries& queries,
                                        const at::Tensor& keys, double scale,
                                        const ScoreTerms& terms) {
  const at::NoGradGuard no_grad;
  const char* where = "extend_expanded";
  check_new(where, keys, keys);
  check_expanded(where, queries, keys, cache_->options().shape);
  TORCH_CHECK_VALUE(cache_->layer(layer).attends_exactly, where,
                    ": must be called in a prefill, got a pass that decodes; absorb the query and "
                    "call extend()");
  const at::Tensor sinks = contiguous_sinks(where, terms.sinks, queries.query);
  const ExpandedQueries asked = {plain(queries.query), queries.weight.contiguous(),
                                 queries.unrotated, queries.by_torch};
  const at::Tensor k = plain(keys);
  const int64_t tokens = k.size(2);
  const EstimateWanted wanted =
      with_value_errors([&] { return cache_->wants_estimate(layer, tokens); });
  if (wanted == EstimateWanted::kFromChunk) {
    estimate(layer, cache_->layer(layer).positions, k, asked.absorbed());
  }
  at::Tensor output =
      at::empty({k.size(0), tokens, asked.heads(), asked.value_dim()}, asked.query.options());
  const ExpandedScope scope(asked, output);
  with_value_errors([&] {
    cache_->extend(layer, tokens_of(k, k), queries_of(asked.query), static_cast<float>(scale),
                   output.data_ptr(), terms_of(terms, sinks));
  });
  return output;
}

/// From tokens that stand, or are to stand, at positions `begin`...
void TensorCache::estimate(int64_t layer, int64_t begin, const at::Tensor& keys,
                           const std::optional<at::Tensor>& query) {
  EstimateFrom from = {.layer = layer,
                       .keys = keys,
                       .query = query,
                       .valid = {},
                       .rank = cache_->options().ranks.at(layer)};
  const int64_t end = begin + keys.size(2);
  if (cache_->has_padding(begin, end)) {
    const int64_t batch = cache_->held().batch;
    TORCH_CHECK_VALUE(keys.size(0) == batch, "extend: keys must be of the ", batch,
                      " sequences that the pass's mask has, got ", keys.size(0));
    from.valid = at::empty({keys.size(0), keys.size(2)}, at::kBool);
    cache_->has_padding(begin, end, from.valid->data_ptr<bool>());
  }
  const auto [key, other] = estimate_(from);
  put_projection(layer, key, other, ProjectionSource::kEstimated);
}

/// Decoding has outgrown what may be attended: the newest keys have to do.
void TensorCache::estimate_late(int64_t layer) {
  const int64_t positions = cache_->layer(layer).positions;
  const int64_t begin = std::max<int64_t>(0, positions - kKeysReadBack);
  estimate(layer, begin, read_back(layer, begin, positions).first, std::nullopt);
}

void TensorCache::set_projection(int64_t layer, const at::Tensor& key_projection,
                                 const at::Tensor& query_projection) {
  put_projection(layer, key_projection, query_projection, ProjectionSource::kGiven);
}

void TensorCache::put_projection(int64_t layer, const at::Tensor& key_projection,
                                 const at::Tensor& query_projection, ProjectionSource source) {
  const int64_t width = cache_->options().shape.width();
  TORCH_CHECK_VALUE(key_projection.sizes() == query_projection.sizes() &&
                        key_projection.dim() == 2 && key_projection.size(0) == width,
                    "set_projection: both projections must be [", width, ", rank], got ",
                    key_projection.sizes(), " and ", query_projection.sizes());
  TORCH_CHECK_VALUE(key_projection.isfinite().all().item<bool>() &&
                        query_projection.isfinite().all().item<bool>(),
                    "set_projection: all numbers must be finite in layer ", layer);
  const Projection pair = {.width = width,
                           .rank = key_projection.size(1),
                           .keys = numbers_of(key_projection),
                           .queries = numbers_of(query_projection)};
  with_value_errors([&] { cache_->set_projection(layer, pair, source); });
}

std::pair<at::Tensor, at::Tensor> TensorCache::read_back(int64_t layer, int64_t begin,
                                                         int64_t end) {
  TORCH_CHECK_VALUE(begin >= 0 && begin <= end, "read_back: positions must rise, got ", begin, "..",
                    end);
  const ModelShape& shape = cache_->options().shape;
  const int64_t batch = cache_->held().batch;
  const auto empty = [&](int64_t width) {
    return at::empty({batch, shape.kv_heads, end - begin, width}, scalar_type(shape.dtype));
  };
  at::Tensor keys = empty(shape.head_dim);
  at::Tensor values = empty(shape.value_width());
  with_value_errors([&] {
    for (int64_t sequence = 0; sequence < batch; ++sequence) {
      cache_->read_back(layer, sequence, begin, end, keys[sequence].data_ptr(),
                        values[sequence].data_ptr());
    }
  });
  return {keys.to(device_), values.to(device_)};
}

}  // namespace kvswap
