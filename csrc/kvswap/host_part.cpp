#include "kvswap/host_part.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/element.h"

namespace kvswap {
namespace {

template <typename T>
void round_to(const float* from, int64_t count, std::byte* to) {
  for (int64_t i = 0; i < count; ++i) reinterpret_cast<T*>(to)[i] = from_float<T>(from[i]);
}

void round_to(DType dtype, const float* from, int64_t count, std::byte* to) {
  if (dtype == DType::kFloat32) return round_to<float>(from, count, to);
  if (dtype == DType::kBFloat16) return round_to<BFloat16>(from, count, to);
  round_to<Float16>(from, count, to);
}

}  // namespace

HostPart::HostPart(const Engine& engine, int64_t part, const PartView& view, const AttendArgs& args)
    : options_(engine.parts().options),
      validity_(engine.sequences().validity(part)),
      view_(view),
      scale_(args.scale),
      softcap_(args.softcap),
      execution_{.parallel = engine.parts().threads()},
      output_(view.query.queries * view.query.heads * options_.head_dim),
      log_sum_exp_(view.query.queries * view.query.heads, -std::numeric_limits<float>::infinity()) {
}

Status HostPart::visit_newest(int64_t begin, int64_t end, const std::byte* keys,
                              const std::byte* values) {
  const int64_t head_stride = (end - begin) * options_.head_dim;
  attend_tokens(begin, end,
                {.keys = keys,
                 .values = values,
                 .key_head_stride = head_stride,
                 .key_token_stride = options_.head_dim,
                 .value_head_stride = head_stride,
                 .value_token_stride = options_.head_dim});
  return Status::ok();
}

void HostPart::add_sinks() {
  const int64_t rows = query().queries * query().heads;
  for (int64_t row = 0; row < rows; ++row) {
    const float share = 1 / (1 + std::exp(view_.sinks[row % query().heads] - log_sum_exp_[row]));
    float* output = output_.data() + row * options_.head_dim;
    for (int64_t i = 0; i < options_.head_dim; ++i) output[i] *= share;
    log_sum_exp_[row] -= std::log(share);
  }
}

KeptTokens::Window HostPart::window(int64_t most) const {
  const int64_t heads = query().heads;
  const int64_t count = std::min(most, query().queries);
  const int64_t first = query().queries - count;
  const int64_t row = options_.head_dim * dtype_bytes(options_.dtype);
  KeptTokens::Window window = {.queries = std::vector<std::byte>(heads * count * row),
                               .log_sum_exp = std::vector<float>(heads * count),
                               .count = count,
                               .first_position = view_.position + first,
                               .scale = scale_,
                               .softcap = softcap_};
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(static_cast<const std::byte*>(query().at(0, head, first + i)), row,
                  window.queries.begin() + (head * count + i) * row);
      window.log_sum_exp[head * count + i] = log_sum_exp_[(first + i) * heads + head];
    }
  }
  return window;
}

void HostPart::write() {
  const int64_t width = query().heads * options_.head_dim;
  const int64_t step = view_.output_stride * dtype_bytes(options_.dtype);
  run_parallel(execution_, query().queries, 16, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      round_to(options_.dtype, output_.data() + token * width, width, view_.output + token * step);
    }
  });
}

}  // namespace kvswap
