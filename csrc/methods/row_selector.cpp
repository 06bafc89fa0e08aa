#include "methods/row_selector.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <string>

#include "kernels/group_topk.h"
#include "kernels/low_rank_score.h"

namespace kvswap {

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

}  // namespace

RowSelector::RowSelector(const MethodOptions& options, std::unique_ptr<Rows> rows,
                         std::shared_ptr<SummaryMemory> memory)
    : options_(options),
      rows_(std::move(rows)),
      memory_(std::move(memory)),
      summaries_(options.layers) {}

bool RowSelector::is_ready(int64_t layer) const {
  const std::vector<int64_t>& exact = options_.exact_layers;
  return rows_->is_ready(layer) && std::find(exact.begin(), exact.end(), layer) == exact.end();
}

/// Empty summaries for all sequences, where the layer can have some.
void RowSelector::start_layer(int64_t layer) {
  summaries_[layer].clear();
  if (!is_ready(layer) || rows_->shape(layer).width == 0) return;
  summaries_[layer].assign(sequences_, Summary(summary_shape(layer), memory_));
}

Summary::Shape RowSelector::summary_shape(int64_t layer) const {
  const RowShape rows = rows_->shape(layer);
  return {rows.width, chunk_rows(options_.group_tokens, rows.tokens_per_row),
          options_.summary_dtype};
}

Status RowSelector::set_projection(int64_t layer, int64_t rank, const float* keys,
                                   const float* queries) {
  KVSWAP_ASSERT(tokens(layer) == 0);
  KVSWAP_RETURN_IF_ERROR(rows_->set_projection(layer, rank, keys, queries));
  start_layer(layer);
  return Status::ok();
}

void RowSelector::drop_projection(int64_t layer) {
  rows_->drop_projection(layer);
  start_layer(layer);
}

int64_t RowSelector::bytes_to_append(int64_t layer, int64_t tokens) const {
  int64_t bytes = 0;
  std::set<const Summary::Chunk*> settled;
  for (const Summary& summary : summaries_[layer]) {
    bytes += summary.bytes_to_append(tokens / rows_->shape(layer).tokens_per_row, &settled);
  }
  return bytes;
}

Status RowSelector::append(const SealedKeys& sealed) {
  KVSWAP_ASSERT(is_ready(sealed.layer));
  if (rows_->shape(sealed.layer).width == 0) return Status::ok();
  const int64_t each = rows_->shape(sealed.layer).tokens_per_row;
  Summary& summary = summaries_[sealed.layer][sealed.sequence];
  const int64_t first_column = summary.rows() * each;
  std::vector<RowPiece> pieces;
  const Status appended = summary.append(
      sealed.tokens / each,
      [&](Summary::Chunk& chunk, int64_t first_row, int64_t first_new_row, int64_t count) {
        const int64_t first = first_new_row * each;
        RowPiece piece;
        piece.sequence = sealed.sequence;
        piece.keys = sealed.keys;
        piece.keys.data = static_cast<const std::byte*>(sealed.keys.data) +
                          first * sealed.keys.token_stride * dtype_bytes(sealed.keys.dtype);
        piece.tokens = count * each;
        piece.valid = sealed.valid;
        piece.first_token = first_column + first;
        piece.rows = chunk.rows.data();
        piece.row_scale = chunk.token_scale.empty() ? nullptr : chunk.token_scale.data();
        piece.first_row = first_row;
        pieces.push_back(piece);
      });
  write(sealed.layer, pieces);
  return appended;
}

void RowSelector::write(int64_t layer, std::span<const RowPiece> pieces) {
  run(static_cast<int64_t>(pieces.size()), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) rows_->write(layer, pieces[i]);
  });
}

void RowSelector::run(int64_t count, const std::function<void(int64_t, int64_t)>& body) const {
  options_.parallel != nullptr ? (*options_.parallel)(count, 1, body) : serial_for(count, 1, body);
}

void RowSelector::choose(const ChooseArgs& args) {
  KVSWAP_ASSERT(is_ready(args.layer) && args.chosen != nullptr);
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
  const bool is_by_mass = options_.score == Score::kMass || options_.score == Score::kMaxMass;
  if (RowsKind::find(options_.rows)->is_given) {
    take_given(args);
  } else {
    is_by_mass ? score_by_mass(args) : score_by_product(args);
  }
  run(batch, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) choose_for_sequence(args, i);
  });
}

Status RowSelector::start_choice(const ChooseArgs& args) {
  const GivenScores wanted = {nullptr, static_cast<int64_t>(args.candidates.size()),
                              args.query.queries, args.groups};
  if (RowsKind::find(options_.rows)->is_given && !rows_->holds(args.layer, wanted)) {
    return Status::invalid("attend: layer " + std::to_string(args.layer) +
                           " must be given scores of its " + std::to_string(args.groups) +
                           " groups for " + std::to_string(wanted.queries) +
                           " queries, got none; call give_scores() before each step");
  }
  choose(args);
  return Status::ok();
}

void RowSelector::take_given(const ChooseArgs& args) {
  rows_->take(args.layer, group_scores_);
  for (int64_t row = 0; row < sequences_ * queries_; ++row) {
    const TokenValidity& valid = *args.candidates[row / queries_].valid;
    float* scores = group_scores_.data() + row * groups_;
    for (int64_t group = 0;
         group * options_.group_tokens < valid.all_valid_from() && group < groups_; ++group) {
      if (valid.mask(group * options_.group_tokens, options_.group_tokens) == 0) {
        scores[group] = kNever;
      }
    }
  }
}

void RowSelector::score_by_product(const ChooseArgs& args) {
  const RowShape rows = rows_->shape(args.layer);
  asked_.resize(sequences_ * queries_ * asked_a_query(args) * rows.width);
  if (options_.score == Score::kMax) {
    rows_->ask_each_head(args.layer, args.query, sequences_, 1.0f, asked_.data());
  } else {
    rows_->ask(args.layer, args.query, sequences_, asked_.data());
  }
  const int64_t chunk_groups = chunk_rows(options_.group_tokens, rows.tokens_per_row) *
                               rows.tokens_per_row / options_.group_tokens;
  const int64_t chunks = (groups_ + chunk_groups - 1) / chunk_groups;
  run(sequences_ * chunks, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) score_chunk(args, i / chunks, i % chunks);
  });
}

void RowSelector::score_by_mass(const ChooseArgs& args) {
  const int64_t heads = args.query.heads;
  const int64_t rank = rows_->shape(args.layer).width;
  asked_.resize(sequences_ * queries_ * heads * rank);
  rows_->ask_each_head(args.layer, args.query, sequences_, args.scale, asked_.data());
  for (int64_t row = 0; row < sequences_ * queries_; ++row) {
    const int64_t sequence = row / queries_;
    const int64_t query = row % queries_;
    mass_.score({.summary = &summaries_[args.layer][sequence],
                 .query = asked_.data() + row * heads * rank,
                 .candidates = &args.candidates[sequence],
                 .heads = heads,
                 .groups = groups_,
                 .join = options_.score == Score::kMass ? HeadJoin::kSum : HeadJoin::kMax,
                 .parallel = options_.parallel},
                options_.group_tokens, group_scores(sequence, query));
  }
}

void RowSelector::score_chunk(const ChooseArgs& args, int64_t sequence, int64_t chunk) {
  const Summary& summary = summaries_[args.layer][sequence];
  const RowShape rows = rows_->shape(args.layer);
  const int64_t rows_a_group = options_.group_tokens / rows.tokens_per_row;
  const int64_t chunk_rows = summary.shape().chunk_tokens;
  const int64_t first = chunk * chunk_rows;
  const int64_t count = std::min(chunk_rows, args.groups * rows_a_group - first);
  KVSWAP_ASSERT(count <= summary.chunk_rows(chunk));
  const Summary::Chunk& source = summary.chunk(chunk);
  const int64_t asked = queries_ * asked_a_query(args);
  thread_local std::vector<float> scores;  // [queries, asked_a_query, chunk_rows]
  scores.resize(asked * chunk_rows);

  LowRankScoreArgs score;
  score.summary = source.rows.data();
  score.token_scale = source.token_scale.empty() ? nullptr : source.token_scale.data();
  score.query = asked_.data() + sequence * asked * rows.width;
  score.scores = scores.data();
  score.score_stride = chunk_rows;
  score.blocks = (count + kSummaryBlock - 1) / kSummaryBlock;
  score.rank = rows.width;
  score.queries = asked;
  score.dtype = options_.summary_dtype;
  low_rank_score(score);

  // A row counts where any of its tokens does.
  const TokenValidity& valid = *args.candidates[sequence].valid;
  const int64_t each = rows.tokens_per_row;
  const int64_t padded = std::min(count, (valid.all_valid_from() + each - 1) / each - first);
  for (int64_t query = 0; query < queries_; ++query) {
    float* of_query = scores.data() + query * asked_a_query(args) * chunk_rows;
    for (int64_t head = 1; head < asked_a_query(args); ++head) {
      const float* of_head = of_query + head * chunk_rows;
      for (int64_t row = 0; row < count; ++row) {
        of_query[row] = std::max(of_query[row], of_head[row]);
      }
    }
    for (int64_t row = 0; row < padded; ++row) {
      if (valid.mask((first + row) * each, each) == 0) of_query[row] = kNever;
    }
    group_max({.scores = of_query,
               .group_scores = group_scores(sequence, query) + first / rows_a_group,
               .tokens = count,
               .group_tokens = rows_a_group});
  }
}

void RowSelector::choose_for_sequence(const ChooseArgs& args, int64_t sequence) {
  std::vector<int32_t>& chosen = (*args.chosen)[sequence];
  chosen.clear();
  const int64_t wanted = args.groups_per_query - args.candidates[sequence].fewer;
  const int64_t k = std::min(std::max<int64_t>(1, wanted), groups_);
  for (int64_t query = 0; query < queries_; ++query) {
    float* scores = group_scores(sequence, query);
    for (const int32_t group : args.candidates[sequence].excluded) {
      if (group < groups_) scores[group] = kNever;
    }
    const auto before = static_cast<int64_t>(chosen.size());
    chosen.resize(before + k);
    const int64_t count =
        top_k({.scores = scores, .indices = chosen.data() + before, .count = groups_, .k = k});
    chosen.resize(before + count);
  }
  if (queries_ > 1) {
    std::sort(chosen.begin(), chosen.end());
    chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  }
}

void RowSelector::truncate(int64_t layer, int64_t tokens) {
  const int64_t rows = tokens / rows_->shape(layer).tokens_per_row;
  for (Summary& summary : summaries_.at(layer)) {
    if (summary.rows() > rows) summary.truncate(rows);
  }
}

int64_t RowSelector::tokens(int64_t layer) const {
  const auto& summaries = summaries_.at(layer);
  return summaries.empty() ? 0 : summaries.front().rows() * rows_->shape(layer).tokens_per_row;
}

void RowSelector::set_sequences(int64_t sequences) {
  sequences_ = sequences;
  for (int64_t layer = 0; layer < options_.layers; ++layer) start_layer(layer);
}

void RowSelector::select_sequences(std::span<const int64_t> indices) {
  sequences_ = static_cast<int64_t>(indices.size());
  for (std::vector<Summary>& summaries : summaries_) {
    if (summaries.empty()) continue;
    std::vector<Summary> selected;
    selected.reserve(indices.size());
    for (const int64_t index : indices) selected.push_back(summaries.at(index));
    summaries = std::move(selected);
  }
}

void RowSelector::clear() {
  set_sequences(0);
  group_scores_ = {};
  mass_.clear();
}

}  // namespace kvswap
