#include "methods/low_rank_selector.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <string>

#include "kernels/group_topk.h"
#include "kernels/low_rank_score.h"
#include "kernels/project.h"

namespace kvswap {

namespace {

constexpr int64_t kChunkTokensMax = 1024;
constexpr float kNever = -std::numeric_limits<float>::infinity();

const std::byte* element(const void* base, int64_t index, DType dtype) {
  return static_cast<const std::byte*>(base) + index * dtype_bytes(dtype);
}

}  // namespace

LowRankSelector::LowRankSelector(const LowRankOptions& options,
                                 std::shared_ptr<SummaryMemory> memory)
    : options_(options), memory_(std::move(memory)), layers_(options.layers) {}

int64_t LowRankSelector::chunk_tokens(int64_t group_tokens) {
  const int64_t unit = std::lcm(kSummaryBlock, group_tokens);
  return std::max(unit, kChunkTokensMax / unit * unit);
}

Status LowRankSelector::set_projection(int64_t layer, int64_t rank, const float* keys,
                                       const float* queries) {
  KVSWAP_ASSERT(tokens(layer) == 0);
  const int64_t bytes = options_.kv_heads * options_.head_dim * rank * int64_t{sizeof(float)};
  Layer& target = layers_.at(layer);
  target = {};
  auto memory = memory_->allocate(2 * bytes);
  if (memory == nullptr) {
    return Status::budget("set_projection: " + std::to_string(2 * bytes) +
                          " bytes of memory must be available, and are not; lower rank");
  }
  memory_->upload(memory.get(), keys, bytes);
  memory_->upload(memory.get() + bytes, queries, bytes);
  target.rank = rank;
  target.projections = std::move(memory);
  const Summary::Shape shape = {rank, chunk_tokens(options_.group_tokens), options_.summary_dtype};
  target.summaries.assign(sequences_, Summary(shape, memory_));
  return Status::ok();
}

int64_t LowRankSelector::projection_bytes() const {
  int64_t floats = 0;
  for (const Layer& layer : layers_) {
    floats += 2 * options_.kv_heads * options_.head_dim * layer.rank;
  }
  return floats * int64_t{sizeof(float)};
}

void LowRankSelector::drop_projection(int64_t layer) { layers_.at(layer) = {}; }

int64_t LowRankSelector::bytes_to_append(int64_t layer, int64_t tokens) const {
  int64_t bytes = 0;
  std::set<const Summary::Chunk*> settled;
  for (const Summary& summary : layers_[layer].summaries) {
    bytes += summary.bytes_to_append(tokens, &settled);
  }
  return bytes;
}

Status LowRankSelector::append(int64_t layer, int64_t sequence, const KeyView& keys,
                               int64_t tokens) {
  KVSWAP_ASSERT(has_projection(layer));
  Layer& target = layers_[layer];
  std::vector<ProjectKeysArgs> pieces;
  const Status appended = target.summaries[sequence].append(
      tokens, [&](Summary::Chunk& chunk, int64_t first_row, int64_t first_token, int64_t count) {
        ProjectKeysArgs args;
        args.keys = element(keys.data, first_token * keys.token_stride, keys.dtype);
        args.head_stride = keys.head_stride;
        args.token_stride = keys.token_stride;
        args.projection = key_projection(target);
        args.summary = chunk.rows.data();
        args.token_scale = chunk.token_scale.empty() ? nullptr : chunk.token_scale.data();
        args.first_row = first_row;
        args.tokens = count;
        args.kv_heads = options_.kv_heads;
        args.head_dim = options_.head_dim;
        args.rank = target.rank;
        args.key_dtype = keys.dtype;
        args.summary_dtype = options_.summary_dtype;
        pieces.push_back(args);
      });
  project(pieces);
  return appended;
}

void LowRankSelector::project(std::span<const ProjectKeysArgs> pieces) {
  run(static_cast<int64_t>(pieces.size()), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) project_keys(pieces[i]);
  });
}

void LowRankSelector::run(int64_t count, const std::function<void(int64_t, int64_t)>& body) const {
  options_.parallel != nullptr ? (*options_.parallel)(count, 1, body) : serial_for(count, 1, body);
}

void LowRankSelector::choose(const ChooseArgs& args) {
  KVSWAP_ASSERT(has_projection(args.layer) && args.chosen != nullptr);
  const auto batch = static_cast<int64_t>(args.candidates.size());
  KVSWAP_ASSERT(batch == sequences_);
  queries_ = args.query.queries;
  groups_ = args.groups;
  const auto scores = static_cast<size_t>(batch * queries_ * groups_);
  if (group_scores_.capacity() < scores) {
    // Not by resize(): it would keep the old beside the new, and take more than was asked.
    group_scores_ = {};
    group_scores_.reserve(scores);
  }
  group_scores_.resize(scores);
  args.chosen->resize(batch);
  options_.score == Score::kSum ? score_by_sum(args) : score_by_mass(args);
  run(batch, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) choose_for_sequence(args, i);
  });
}

void LowRankSelector::score_by_sum(const ChooseArgs& args) {
  project_queries(args);
  const int64_t chunk_groups = chunk_tokens(options_.group_tokens) / options_.group_tokens;
  const int64_t chunks = (groups_ + chunk_groups - 1) / chunk_groups;
  run(sequences_ * chunks, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) score_chunk(args, i / chunks, i % chunks);
  });
}

void LowRankSelector::score_by_mass(const ChooseArgs& args) {
  KVSWAP_ASSERT(args.kept != nullptr && args.kept->heads == args.query.heads);
  const int64_t heads = args.query.heads;
  const int64_t rank = layers_[args.layer].rank;
  project_each_head(args);
  kept_.resize(sequences_ * heads * queries_);
  PagedAttentionArgs kept = *args.kept;
  kept.log_sum_exp = kept_.data();
  paged_attention(kept, {.parallel = options_.parallel});
  for (int64_t row = 0; row < sequences_ * queries_; ++row) {
    const int64_t sequence = row / queries_;
    const int64_t query = row % queries_;
    mass_.score({.summary = &layers_[args.layer].summaries[sequence],
                 .query = projected_.data() + row * heads * rank,
                 .kept_log_sum_exp = kept_.data() + sequence * heads * queries_ + query,
                 .kept_stride = queries_,
                 .candidates = &args.candidates[sequence],
                 .heads = heads,
                 .groups = groups_,
                 .join = options_.score == Score::kMass ? HeadJoin::kSum : HeadJoin::kMax,
                 .parallel = options_.parallel},
                options_.group_tokens, group_scores(sequence, query));
  }
}

void LowRankSelector::project_queries(const ChooseArgs& args) {
  const Layer& layer = layers_[args.layer];
  projected_.resize(sequences_ * queries_ * layer.rank);
  for (int64_t row = 0; row < sequences_ * queries_; ++row) {
    const int64_t offset =
        row / queries_ * args.query.batch_stride + row % queries_ * args.query.query_stride;
    ProjectQueryArgs project;
    project.query = element(args.query.data, offset, args.query.dtype);
    project.head_stride = args.query.head_stride;
    project.projection = query_projection(layer);
    project.projected = projected_.data() + row * layer.rank;
    project.heads = args.query.heads;
    project.kv_heads = options_.kv_heads;
    project.head_dim = options_.head_dim;
    project.rank = layer.rank;
    project.dtype = args.query.dtype;
    project_query(project);
  }
}

/// Each head's query with the projection of its own KV head, times attention's scale.
void LowRankSelector::project_each_head(const ChooseArgs& args) {
  const Layer& layer = layers_[args.layer];
  const int64_t heads = args.query.heads;
  projected_.resize(sequences_ * queries_ * heads * layer.rank);
  run(sequences_ * queries_ * heads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / heads;
      const int64_t head = i % heads;
      const int64_t kv_head = head / (heads / options_.kv_heads);
      const int64_t offset = row / queries_ * args.query.batch_stride +
                             row % queries_ * args.query.query_stride +
                             head * args.query.head_stride;
      float* target = projected_.data() + i * layer.rank;
      project_query(
          {.query = element(args.query.data, offset, args.query.dtype),
           .projection = query_projection(layer) + kv_head * options_.head_dim * layer.rank,
           .projected = target,
           .heads = 1,
           .kv_heads = 1,
           .head_dim = options_.head_dim,
           .rank = layer.rank,
           .dtype = args.query.dtype});
      for (int64_t r = 0; r < layer.rank; ++r) target[r] *= args.scale;
    }
  });
}

void LowRankSelector::score_chunk(const ChooseArgs& args, int64_t sequence, int64_t chunk) {
  const Layer& layer = layers_[args.layer];
  const Summary& summary = layer.summaries[sequence];
  const int64_t chunk_tokens = summary.shape().chunk_tokens;
  const int64_t first = chunk * chunk_tokens;
  const int64_t rows = std::min(chunk_tokens, args.groups * options_.group_tokens - first);
  KVSWAP_ASSERT(rows <= summary.chunk_rows(chunk));
  const int64_t blocks = (rows + kSummaryBlock - 1) / kSummaryBlock;
  const Summary::Chunk& source = summary.chunk(chunk);
  thread_local std::vector<float> scores;  // [queries, chunk_tokens]
  scores.resize(queries_ * chunk_tokens);

  LowRankScoreArgs score;
  score.summary = source.rows.data();
  score.token_scale = source.token_scale.empty() ? nullptr : source.token_scale.data();
  score.query = projected_.data() + sequence * queries_ * layer.rank;
  score.scores = scores.data();
  score.score_stride = chunk_tokens;
  score.blocks = blocks;
  score.rank = layer.rank;
  score.queries = queries_;
  score.dtype = options_.summary_dtype;
  low_rank_score(score);

  const TokenValidity& valid = *args.candidates[sequence].valid;
  const int64_t padded = std::min(rows, valid.all_valid_from() - first);
  for (int64_t query = 0; query < queries_; ++query) {
    float* of_query = scores.data() + query * chunk_tokens;
    for (int64_t row = 0; row < padded; ++row) {
      if (!valid.is_valid(first + row)) of_query[row] = kNever;
    }
    group_max({.scores = of_query,
               .group_scores = group_scores(sequence, query) + first / options_.group_tokens,
               .tokens = rows,
               .group_tokens = options_.group_tokens});
  }
}

void LowRankSelector::choose_for_sequence(const ChooseArgs& args, int64_t sequence) {
  std::vector<int32_t>& chosen = (*args.chosen)[sequence];
  chosen.clear();
  for (int64_t query = 0; query < queries_; ++query) {
    float* scores = group_scores(sequence, query);
    for (const int32_t group : args.candidates[sequence].excluded) {
      if (group < groups_) scores[group] = kNever;
    }
    const auto before = static_cast<int64_t>(chosen.size());
    chosen.resize(before + std::min(args.groups_per_query, groups_));
    const int64_t count = top_k({.scores = scores,
                                 .indices = chosen.data() + before,
                                 .count = groups_,
                                 .k = std::min(args.groups_per_query, groups_)});
    chosen.resize(before + count);
  }
  if (queries_ > 1) {
    std::sort(chosen.begin(), chosen.end());
    chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  }
}

void LowRankSelector::truncate(int64_t layer, int64_t tokens) {
  for (Summary& summary : layers_.at(layer).summaries) {
    if (summary.rows() > tokens) summary.truncate(tokens);
  }
}

int64_t LowRankSelector::tokens(int64_t layer) const {
  const auto& summaries = layers_.at(layer).summaries;
  return summaries.empty() ? 0 : summaries.front().rows();
}

void LowRankSelector::set_sequences(int64_t sequences) {
  sequences_ = sequences;
  for (Layer& layer : layers_) {
    if (layer.rank == 0) continue;
    const Summary::Shape shape = {layer.rank, chunk_tokens(options_.group_tokens),
                                  options_.summary_dtype};
    layer.summaries.assign(sequences, Summary(shape, memory_));
  }
}

void LowRankSelector::select_sequences(std::span<const int64_t> indices) {
  sequences_ = static_cast<int64_t>(indices.size());
  for (Layer& layer : layers_) {
    if (layer.rank == 0) continue;
    std::vector<Summary> selected;
    selected.reserve(indices.size());
    for (const int64_t index : indices) selected.push_back(layer.summaries.at(index));
    layer.summaries = std::move(selected);
  }
}

void LowRankSelector::clear() {
  set_sequences(0);
  group_scores_ = {};
  mass_.clear();
}

}  // namespace kvswap
