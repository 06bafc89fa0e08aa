#include "torch/disk_cache.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "engine/check_settings.h"
#include "io/timeline.h"
#include "torch/parallel.h"
#include "torch/projection.h"
#include "torch/session.h"
#include "torch/torch_device.h"

namespace kvswap {
namespace {

constexpr int64_t kKeysReadBack = 2048;  // newest keys that a late estimate looks at

at::ScalarType scalar_type(ElementType type) {
  return type == ElementType::kFloat32    ? at::kFloat
         : type == ElementType::kBFloat16 ? at::kBFloat16
                                          : at::kHalf;
}

at::Tensor as_tensor(const std::vector<float>& matrix, int64_t rows, int64_t columns) {
  return at::from_blob(const_cast<float*>(matrix.data()), {rows, columns}, at::kFloat);
}

}  // namespace

DiskCache::DiskCache(const OpenArgs& args) {
  const Opening opening = prepare(args);
  options_ = opening.options;
  predictor_bytes_ = options_.settings.look_ahead ? args.predictor_bytes : 0;
  is_calibrated_ = !opening.projections.empty();
  is_estimated_.assign(args.shape.layers, false);
  session_ = std::make_unique<Session>(options_);
  for (size_t layer = 0; layer < opening.projections.size(); ++layer) {
    if (is_exact(options_.settings, static_cast<int64_t>(layer))) continue;
    const Projection& pair = opening.projections[layer];
    session_->set_projection(static_cast<int64_t>(layer),
                             as_tensor(pair.keys, pair.width, pair.rank),
                             as_tensor(pair.queries, pair.width, pair.rank));
  }
}

DiskCache::~DiskCache() = default;

void DiskCache::look_ahead(int64_t layer, int64_t tokens,
                           const std::function<at::Tensor()>& predict,
                           std::optional<double> scale) {
  if (session_->attends_all(layer)) {
    session_->look_ahead(layer, any_query(tokens));
    return;
  }
  const int64_t began_ns = Timeline::now_ns();
  const at::Tensor query = predict();
  session_->record_predict(layer, began_ns);
  session_->look_ahead(layer, query, scale);
}

int64_t DiskCache::columns() const { return session_->columns(0); }

bool DiskCache::wants_look_ahead(int64_t layer, int64_t tokens) const {
  const Settings& settings = options_.settings;
  const auto& own = settings.true_query_layers;
  return settings.look_ahead && layer >= 0 && layer < options_.shape.layers &&
         std::find(own.begin(), own.end(), layer) == own.end() &&
         tokens <= settings.select_queries_max &&
         session_->columns(layer) >= settings.tail_tokens + settings.group_tokens;
}

at::Tensor DiskCache::any_query(int64_t tokens) const {
  const ModelShape& shape = options_.shape;
  return at::zeros(
      {session_->batch(), shape.kv_heads, tokens, shape.head_dim},
      at::TensorOptions(scalar_type(shape.dtype)).device(tensor_device(options_.device)));
}

bool DiskCache::will_choose(int64_t layer, int64_t tokens) const {
  const Settings& settings = options_.settings;
  // Rows that have no projection have no rank either.
  const bool is_ready = is_calibrated_ || options_.ranks.empty() || is_estimated_.at(layer) ||
                        is_exact(settings, layer);
  if (is_ready || tokens <= settings.select_queries_max) {
    return false;
  }
  const int64_t columns = session_->columns(layer) + tokens - settings.tail_tokens;
  return columns / settings.group_tokens > settings.groups_max;
}

void DiskCache::estimate(int64_t layer, const at::Tensor& keys,
                         const std::optional<at::Tensor>& query) {
  const auto [key, other] =
      estimate_projection(options_.settings.projection_kind, keys, query, options_.ranks.at(layer),
                          options_.settings.score, options_.settings.heads);
  session_->set_projection(layer, key, other);
  is_estimated_[layer] = true;
}

at::Tensor DiskCache::attend(int64_t layer, const at::Tensor& query, const at::Tensor& keys,
                             const at::Tensor& values, double scale) {
  return attend(layer, query, keys, values, scale, {});
}

at::Tensor DiskCache::attend(int64_t layer, const at::Tensor& query, const at::Tensor& keys,
                             const at::Tensor& values, double scale, const ScoreTerms& terms) {
  const at::NoGradGuard no_grad;
  // Before the chunk is appended: then nothing must be read back for its summary.
  if (keys.dim() == 4 && layer >= 0 && layer < options_.shape.layers &&
      will_choose(layer, keys.size(2))) {
    estimate(layer, keys, query);
  }
  session_->append(layer, keys, values);
  if (session_->needs_projection(layer)) {
    // Decoding has outgrown what may be attended: the newest keys have to do.
    const int64_t columns = session_->columns(layer);
    const auto newest =
        session_->read_back(layer, std::max<int64_t>(0, columns - kKeysReadBack), columns);
    estimate(layer, newest.first, std::nullopt);
  }
  return session_->attend(layer, query, keys, values, scale, terms);
}

}  // namespace kvswap
