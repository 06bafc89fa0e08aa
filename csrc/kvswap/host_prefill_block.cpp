#include "kvswap/host_prefill_block.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "engine/sequence/token_codec.h"
#include "kernels/chunk_attention.h"
#include "kernels/cpu/element.h"

namespace kvswap {
namespace {

constexpr int64_t kAloneQueries = 512;  // whose answers are in fp32 at a time

template <typename T>
void round_to(const float* from, int64_t count, std::byte* to) {
  for (int64_t i = 0; i < count; ++i) reinterpret_cast<T*>(to)[i] = from_float<T>(from[i]);
}

void round_to(DType dtype, const float* from, int64_t count, std::byte* to) {
  if (dtype == DType::kFloat32) return round_to<float>(from, count, to);
  if (dtype == DType::kBFloat16) return round_to<BFloat16>(from, count, to);
  round_to<Float16>(from, count, to);
}

class HostPart final : public ExactPart {
 public:
  HostPart(const Engine& engine, int64_t part, const PartView& view, const AttendArgs& args)
      : plan_(engine.context().plan),
        options_(plan_.options),
        validity_(engine.sequences().validity(part)),
        view_(view),
        scale_(args.scale),
        softcap_(args.softcap),
        execution_{.parallel = engine.context().threads()},
        value_width_(plan_.record_shape.value_width()),
        output_(view.query.queries * view.query.heads * value_width_),
        log_sum_exp_(view.query.queries * view.query.heads,
                     -std::numeric_limits<float>::infinity()) {}

  /// Tokens at positions [begin, end) of the part: sequence 0 of the view.
  void attend_tokens(int64_t begin, int64_t end, const KeyValueView& tokens) {
    attend({.view = {.keys = const_cast<void*>(tokens.keys),
                     .values = const_cast<void*>(tokens.values),
                     .key_head_stride = tokens.key_head_stride,
                     .key_token_stride = tokens.key_token_stride,
                     .value_head_stride = tokens.value_head_stride,
                     .value_token_stride = tokens.value_token_stride},
            .tokens = end - begin,
            .position = begin});
  }

  bool unpacks() const override { return plan_.has_float8_records; }

  Status visit_newest(int64_t begin, int64_t end, const std::byte* keys,
                      const std::byte* values) override {
    attend_tokens(begin, end,
                  {.keys = keys,
                   .values = values,
                   .key_head_stride = (end - begin) * options_.head_dim,
                   .key_token_stride = options_.head_dim,
                   .value_head_stride = (end - begin) * value_width_,
                   .value_token_stride = value_width_});
    return Status::ok();
  }

  Status visit_sealed(const PrefixStream::Block& block) override {
    const int64_t group_tokens = options_.group_tokens;
    std::vector<const void*> records(block.listed->pages.begin(), block.listed->pages.end());
    if (unpacks()) decode(block, records);
    attend({.records = records.data(),
            .tokens = block.groups * group_tokens,
            .position = block.first_group * group_tokens});
    return Status::ok();
  }

  Status visit_left(const SurvivingTokens& left) override {
    const int64_t group_tokens = options_.group_tokens;
    std::vector<const void*> records;
    for (int64_t token = 0; token < left.count; token += group_tokens) {
      records.push_back(left.pages.data() + token / group_tokens * plan_.group_bytes);
    }
    // They all count, and are before every query of the chunk, wherever they stood.
    run({.records = records.data(), .tokens = left.count, .position = view_.position - left.count});
    return Status::ok();
  }

  void add_sinks() override {
    const int64_t rows = view_.query.queries * view_.query.heads;
    for (int64_t row = 0; row < rows; ++row) {
      const float share =
          1 / (1 + std::exp(view_.sinks[row % view_.query.heads] - log_sum_exp_[row]));
      float* output = output_.data() + row * value_width_;
      for (int64_t i = 0; i < value_width_; ++i) output[i] *= share;
      log_sum_exp_[row] -= std::log(share);
    }
  }

  RetainedTokens::Window window(int64_t most) const override {
    const int64_t heads = view_.query.heads;
    const int64_t count = std::min(most, view_.query.queries);
    const int64_t first = view_.query.queries - count;
    const int64_t row = options_.head_dim * dtype_bytes(options_.dtype);
    RetainedTokens::Window window = {.queries = std::vector<std::byte>(heads * count * row),
                                     .log_sum_exp = std::vector<float>(heads * count),
                                     .count = count,
                                     .first_position = view_.position + first,
                                     .scale = scale_,
                                     .softcap = softcap_};
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(static_cast<const std::byte*>(view_.query.at(0, head, first + i)), row,
                    window.queries.begin() + (head * count + i) * row);
        window.log_sum_exp[head * count + i] = log_sum_exp_[(first + i) * heads + head];
      }
    }
    return window;
  }

  void write() override {
    const int64_t width = view_.query.heads * value_width_;
    const int64_t step = view_.output_stride * dtype_bytes(options_.dtype);
    run_parallel(execution_, view_.query.queries, 16, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        round_to(options_.dtype, output_.data() + token * width, width,
                 view_.output + token * step);
      }
    });
  }

 private:
  /// Pages of e4m3 become those of the cache's dtype.
  void decode(const PrefixStream::Block& block, std::vector<const void*>& records) {
    const int64_t bytes = plan_.group_bytes;
    if (block.room == nullptr) decoded_.resize(block.groups * bytes);
    std::byte* room = block.room == nullptr ? decoded_.data() : block.room;
    run_parallel(execution_, block.groups, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int8_t* exponents = block.listed->exponents.data() + i * plan_.note_bytes;
        records[i] = tokens_of_page(plan_, block.listed->pages[i], exponents, room + i * bytes);
      }
    });
  }

  /// Tokens by their positions; padding does not count.
  void attend(ChunkAttentionArgs args) {
    std::vector<uint8_t> valid;
    if (args.position < validity_.all_valid_from()) {
      valid.resize(args.tokens);
      for (int64_t t = 0; t < args.tokens; ++t) valid[t] = validity_.is_valid(args.position + t);
      args.valid = valid.data();
    }
    run(args);
  }

  void run(ChunkAttentionArgs args) {
    args.query = view_.query.data;
    args.query_head_stride = view_.query.head_stride;
    args.query_token_stride = view_.query.query_stride;
    args.output = output_.data();
    args.log_sum_exp = log_sum_exp_.data();
    args.query_position = view_.position;
    args.heads = view_.query.heads;
    args.queries = view_.query.queries;
    args.scale = scale_;
    args.softcap = softcap_;
    args.shape = plan_.record_shape;
    args.dtype = options_.dtype;
    chunk_attention(args, execution_);
  }

  const Plan& plan_;
  const EngineOptions& options_;
  const PaddingMask& validity_;
  const PartView view_;
  const float scale_;
  const float softcap_;
  const Execution execution_;
  const int64_t value_width_;
  std::vector<float> output_;       // [tokens, heads, value_width_]
  std::vector<float> log_sum_exp_;  // [tokens, heads]
  std::vector<std::byte> decoded_;  // a block, where it has no room for that
};

}  // namespace

std::unique_ptr<ExactPart> host_part(const Engine& engine, int64_t part, const PartView& view,
                                     const AttendArgs& args) {
  auto attending = std::make_unique<HostPart>(engine, part, view, args);
  attending->attend_tokens(view.position, view.position + view.query.queries, view.own);
  return attending;
}

void attend_part_alone(const Engine& engine, int64_t part, const PartView& view,
                       const AttendArgs& args) {
  const EngineOptions& options = engine.context().options;
  for (int64_t first = 0; first < view.query.queries; first += kAloneQueries) {
    PartView some = view;
    some.query.data = view.query.at(0, 0, first);
    some.query.queries = std::min(kAloneQueries, view.query.queries - first);
    some.position = view.position + first;
    some.output = view.output + first * view.output_stride * dtype_bytes(options.dtype);
    HostPart attending(engine, part, some, args);
    attending.attend_tokens(view.position, some.position + some.query.queries, view.own);
    attending.write();
  }
}

}  // namespace kvswap
