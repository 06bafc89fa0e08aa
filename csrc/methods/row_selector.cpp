#include "methods/row_selector.h"

#include <algorithm>
#include <limits>
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
      is_given_(RowsKind::find(options.rows)->is_given),
      rows_(std::move(rows)),
      summaries_(options_, *rows_, std::move(memory)) {}

Status RowSelector::set_projection(int64_t layer, int64_t rank, const float* keys,
                                   const float* queries) {
  KVSWAP_ASSERT(summaries_.tokens(layer) == 0);
  KVSWAP_RETURN_IF_ERROR(rows_->set_projection(layer, rank, keys, queries));
  summaries_.start_layer(layer);
  return Status::ok();
}

void RowSelector::drop_projection(int64_t layer) {
  rows_->drop_projection(layer);
  summaries_.start_layer(layer);
}

Status RowSelector::append(const SealedKeys& sealed) {
  return summaries_.append(sealed,
                           [&](std::span<const RowPiece> pieces) { write(sealed.layer, pieces); });
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
  KVSWAP_ASSERT(batch == summaries_.sequences());
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
  if (is_given_) {
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
  if (is_given_ && !rows_->holds(args.layer, wanted)) {
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
  for (int64_t row = 0; row < sequences() * queries_; ++row) {
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
  asked_.resize(sequences() * queries_ * asked_a_query(args) * rows.width);
  if (options_.score == Score::kMax) {
    rows_->ask_each_head(args.layer, args.query, sequences(), 1.0f, asked_.data());
  } else {
    rows_->ask(args.layer, args.query, sequences(), asked_.data());
  }
  const int64_t chunk_groups = chunk_rows(options_.group_tokens, rows.tokens_per_row) *
                               rows.tokens_per_row / options_.group_tokens;
  const int64_t chunks = (groups_ + chunk_groups - 1) / chunk_groups;
  run(sequences() * chunks, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) score_chunk(args, i / chunks, i % chunks);
  });
}

void RowSelector::score_by_mass(const ChooseArgs& args) {
  const int64_t heads = args.query.heads;
  const int64_t rank = rows_->shape(args.layer).width;
  asked_.resize(sequences() * queries_ * heads * rank);
  rows_->ask_each_head(args.layer, args.query, sequences(), args.scale, asked_.data());
  for (int64_t row = 0; row < sequences() * queries_; ++row) {
    const int64_t sequence = row / queries_;
    const int64_t query = row % queries_;
    mass_.score({.summary = &summaries_.of(args.layer, sequence),
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
  const Summary& summary = summaries_.of(args.layer, sequence);
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

void RowSelector::clear() {
  summaries_.set_sequences(0);
  group_scores_ = {};
  mass_.clear();
}

}  // namespace kvswap
