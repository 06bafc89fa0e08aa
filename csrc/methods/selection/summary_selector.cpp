#include "methods/selection/summary_selector.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "kernels/group_topk.h"

namespace kvswap {

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

/// asked: [means, of_each, rank] becomes [means, rank].
void average_heads(float* asked, int64_t means, int64_t of_each, int64_t rank) {
  const float share = 1.0f / static_cast<float>(of_each);
  for (int64_t mean = 0; mean < means; ++mean) {
    const float* from = asked + mean * of_each * rank;
    float* to = asked + mean * rank;  // at or before what is read
    for (int64_t column = 0; column < rank; ++column) {
      float sum = 0;
      for (int64_t head = 0; head < of_each; ++head) sum += from[head * rank + column];
      to[column] = share * sum;
    }
  }
}

/// Groups that each of the sequence's queries chooses, at most.
int64_t wanted(const ChooseArgs& args, int64_t sequence) {
  const int64_t wanted = args.groups_per_query - args.candidates[sequence].fewer;
  return std::min(std::max<int64_t>(1, wanted), args.groups);
}

}  // namespace

SummarySelector::SummarySelector(const MethodOptions& options, std::unique_ptr<SummaryEncoder> rows,
                                 std::shared_ptr<SummaryMemory> memory)
    : options_(options),
      is_given_(SummaryKind::find(options.rows)->is_given),
      rows_(std::move(rows)),
      summaries_(options_, *rows_, std::move(memory)) {}

Status SummarySelector::set_projection(int64_t layer, int64_t rank, const float* keys,
                                       const float* queries) {
  KVSWAP_ASSERT(summaries_.tokens(layer) == 0);
  KVSWAP_RETURN_IF_ERROR(rows_->set_projection(layer, rank, keys, queries));
  summaries_.start_layer(layer);
  return Status::ok();
}

void SummarySelector::drop_projection(int64_t layer) {
  rows_->drop_projection(layer);
  summaries_.start_layer(layer);
}

Status SummarySelector::append(std::span<const SealedKeys> sealed) {
  std::vector<SummarySlice> pieces;
  Status appended;
  for (const SealedKeys& each : sealed) {
    appended = summaries_.append(each, pieces);
    if (!appended.is_ok()) break;
  }
  if (!pieces.empty()) write(sealed.front().layer, pieces);
  return appended;
}

Status SummarySelector::rewrite(const ChangedKeys& changed) {
  auto piece = summaries_.rewrite(changed);
  if (!piece.is_ok()) return piece.status();
  write(changed.layer, std::span(&piece.value(), 1));
  return Status::ok();
}

void SummarySelector::write(int64_t layer, std::span<const SummarySlice> pieces) {
  run(static_cast<int64_t>(pieces.size()), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) rows_->write(layer, pieces[i]);
  });
}

void SummarySelector::run(int64_t count, const std::function<void(int64_t, int64_t)>& body) const {
  options_.parallel != nullptr ? (*options_.parallel)(count, 1, body) : serial_for(count, 1, body);
}

void SummarySelector::choose(const ChooseArgs& args) {
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

Status SummarySelector::start_choice(const ChooseArgs& args) {
  const UserScores wanted = {nullptr, static_cast<int64_t>(args.candidates.size()),
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

void SummarySelector::take_given(const ChooseArgs& args) {
  rows_->take(args.layer, group_scores_);
  for (int64_t row = 0; row < sequences() * queries_; ++row) {
    const PaddingMask& valid = *args.candidates[row / queries_].valid;
    float* scores = group_scores_.data() + row * groups_;
    for (int64_t group = 0;
         group * options_.group_tokens < valid.all_valid_from() && group < groups_; ++group) {
      if (valid.mask(group * options_.group_tokens, options_.group_tokens) == 0) {
        scores[group] = kNever;
      }
    }
  }
}

void SummarySelector::score_by_product(const ChooseArgs& args) {
  const SummaryShape rows = rows_->shape(args.layer);
  asked_.resize(sequences() * queries_ * asked_a_query(args) * rows.width);
  if (options_.score == Score::kMax) {
    rows_->ask_each_head(args.layer, args.query, sequences(), 1.0f, asked_.data());
  } else {
    rows_->ask(args.layer, args.query, sequences(), asked_.data());
  }
  const int64_t vectors = asked_a_query(args);
  products_.clear();
  for (int64_t sequence = 0; sequence < sequences(); ++sequence) {
    products_.push_back({.summary = &summaries_.of(args.layer, sequence),
                         .asked = asked_.data() + sequence * queries_ * vectors * rows.width,
                         .candidates = &args.candidates[sequence],
                         .queries = queries_,
                         .vectors = vectors,
                         .tokens_per_row = rows.tokens_per_row,
                         .groups = groups_,
                         .group_tokens = options_.group_tokens,
                         .wanted = wanted(args, sequence),
                         .share = options_.score_share,
                         .group_scores = group_scores(sequence, 0)});
  }
  if (!products_.empty()) scorer_.score(products_, options_.parallel);
}

void SummarySelector::score_by_mass(const ChooseArgs& args) {
  const int64_t heads = args.query.heads;
  const int64_t rank = rows_->shape(args.layer).width;
  asked_.resize(sequences() * queries_ * heads * rank);
  rows_->ask_each_head(args.layer, args.query, sequences(), args.scale, asked_.data());
  const bool is_coarse = args.effort == Effort::kCoarse;
  const int64_t askers = is_coarse ? std::min(options_.kv_heads, heads) : heads;
  for (int64_t row = 0; row < sequences() * queries_; ++row) {
    const int64_t sequence = row / queries_;
    const int64_t query = row % queries_;
    float* asked = asked_.data() + row * heads * rank;
    if (askers < heads) average_heads(asked, askers, heads / askers, rank);
    mass_.score({.summary = &summaries_.of(args.layer, sequence),
                 .query = asked,
                 .candidates = &args.candidates[sequence],
                 .heads = askers,
                 .groups = groups_,
                 .join = options_.score == Score::kMass ? HeadJoin::kSum : HeadJoin::kMax,
                 .parallel = options_.parallel},
                options_.group_tokens, group_scores(sequence, query));
  }
}

void SummarySelector::choose_for_sequence(const ChooseArgs& args, int64_t sequence) {
  std::vector<int32_t>& chosen = (*args.chosen)[sequence];
  chosen.clear();
  const int64_t k = wanted(args, sequence);
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
    if (!args.candidates[sequence].last.empty()) {
      drop_new(scores, args.candidates[sequence].last, k, before, chosen);
    }
  }
  if (queries_ > 1) {
    std::sort(chosen.begin(), chosen.end());
    chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  }
}

/// Of a query's choice, `chosen` from `first` on, groups leave that are neither of `last` nor among
/// its best.
void SummarySelector::drop_new(const float* scores, std::span<const int32_t> last, int64_t k,
                               int64_t first, std::vector<int32_t>& chosen) const {
  const auto most = static_cast<int64_t>(std::ceil(options_.new_group_ratio * k));
  if (most >= std::ssize(chosen) - first) return;
  std::vector<int32_t> best(most);
  best.resize(top_k({.scores = scores, .indices = best.data(), .count = groups_, .k = most}));
  const auto leaves = [&](int32_t group) {
    return !std::ranges::binary_search(best, group) && !std::ranges::binary_search(last, group);
  };
  chosen.erase(std::remove_if(chosen.begin() + first, chosen.end(), leaves), chosen.end());
}

void SummarySelector::clear() {
  summaries_.set_sequences(0);
  group_scores_ = {};
  scorer_.clear();
  mass_.clear();
}

}  // namespace kvswap
