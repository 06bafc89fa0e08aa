#include "methods/selection/logit_scorer.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "kernels/digit_score.h"
#include "kernels/group_topk.h"
#include "kernels/low_rank_score.h"

namespace kvswap {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

/// Scratch of a thread, for one chunk after another.
struct Scratch {
  std::vector<float> products;    // [queries, vectors, chunk rows]
  std::vector<float> further;     // [vectors, chunk rows]: of the columns that stand apart
  std::vector<float> best;        // [chunk rows]
  std::vector<float> units;       // [units of a chunk]
  std::vector<int32_t> retained;  // of them
};

/// What the second stage takes or leaves, in groups: a block, or some.
int64_t unit_groups(int64_t group_tokens) {
  return std::lcm(kSummaryBlock, group_tokens) / group_tokens;
}

int64_t ratio_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

/// One chunk of one sequence's summary.
class ChunkScorer {
 public:
  ChunkScorer(const ProductArgs& args, int64_t chunk, const float* asked_apart, Scratch& scratch)
      : args_(args),
        shape_(args.summary->shape()),
        source_(args.summary->chunk(chunk)),
        next_(chunk + 1 < args.summary->chunks() ? &args.summary->chunk(chunk + 1) : nullptr),
        scratch_(scratch),
        asked_first_(asked_apart),
        asked_rest_(asked_apart + vectors() * shape_.first_columns),
        rows_a_group_(args.group_tokens / args.tokens_per_row),
        first_row_(chunk * shape_.chunk_tokens),
        rows_(std::min(shape_.chunk_tokens, args.groups * rows_a_group_ - first_row_)) {
    KVSWAP_ASSERT(rows_ <= args.summary->chunk_rows(chunk));
    scratch.products.resize(vectors() * stride());
    scratch.best.resize(stride());
  }

  void run() {
    const bool is_whole = shape_.rest_columns() == 0;
    multiply(source_.rows.data(), shape_.rank - shape_.rest_columns(),
             is_whole ? args_.asked : asked_first_, vectors(), {0, rows_},
             scratch_.products.data());
    for (int64_t query = 0; query < args_.queries; ++query) {
      is_whole ? settle(query, {0, rows_}) : score_rest(query);
    }
  }

 private:
  struct Range {
    int64_t first = 0;  // rows, of the chunk
    int64_t count = 0;
  };
  int64_t vectors() const { return args_.queries * args_.vectors; }
  int64_t stride() const { return shape_.chunk_tokens; }
  float* products(int64_t query) const {
    return scratch_.products.data() + query * args_.vectors * stride();
  }
  float* group_scores(int64_t query, int64_t row) const {
    return args_.group_scores + query * args_.groups + (first_row_ + row) / rows_a_group_;
  }

  /// target: [count, stride], from the range's first row on.
  void multiply(const std::byte* part, int64_t columns, const float* asked, int64_t count,
                Range range, float* target) const {
    const KeySummary::Chunk* next = part == source_.rows.data() ? next_ : nullptr;
    const LowRankScoreArgs args = {
        .summary = part + range.first * row_bytes(shape_.dtype, columns),
        .token_scale =
            source_.token_scale.empty() ? nullptr : source_.token_scale.data() + range.first,
        .query = asked,
        .scores = target,
        .score_stride = stride(),
        .next_summary = next != nullptr ? next->rows.data() : nullptr,
        .next_scale = next != nullptr ? next->token_scale.data() : nullptr,
        .blocks = ratio_up(range.count, kSummaryBlock),
        .rank = columns,
        .queries = count,
        .dtype = shape_.dtype};
    if (!digit_score(args)) low_rank_score(args);
  }

  /// Groups' scores of the products that are there.
  void settle(int64_t query, Range range) const {
    const float* scores = products(query) + range.first;
    if (args_.vectors > 1 || first_valid_row() > range.first) {
      scores = join_vectors(query, range);
    }
    group_max({.scores = scores,
               .group_scores = group_scores(query, range.first),
               .tokens = range.count,
               .group_tokens = rows_a_group_});
  }

  int64_t first_valid_row() const {
    return ratio_up(args_.candidates->valid->all_valid_from(), args_.tokens_per_row) - first_row_;
  }

  /// The best of a query's vectors, and nothing where no token of a row counts.
  const float* join_vectors(int64_t query, Range range) const {
    float* best = scratch_.best.data();
    const float* from = products(query) + range.first;
    std::copy_n(from, range.count, best);
    for (int64_t vector = 1; vector < args_.vectors; ++vector) {
      from += stride();
      for (int64_t row = 0; row < range.count; ++row) best[row] = std::max(best[row], from[row]);
    }
    const int64_t each = args_.tokens_per_row;
    const int64_t padded = std::min(range.count, first_valid_row() - range.first);
    for (int64_t row = 0; row < padded; ++row) {
      const int64_t token = (first_row_ + range.first + row) * each;
      if (args_.candidates->valid->mask(token, each) == 0) best[row] = kNever;
    }
    return best;
  }

  /// By the columns that stand apart, too: all blocks of the chunk or the best.
  void score_rest(int64_t query) {
    const int64_t unit = unit_groups(args_.group_tokens);
    const int64_t units = ratio_up(rows_ / rows_a_group_, unit);
    const int64_t of_all = ratio_up(args_.groups, unit);
    const int64_t count =
        std::max(static_cast<int64_t>(std::ceil(args_.share * static_cast<double>(units))),
                 ratio_up(args_.wanted * units, of_all));
    if (count >= units) {
      add_rest(query, {0, rows_});
      return settle(query, {0, rows_});
    }
    settle(query, {0, rows_});
    const int64_t retained = choose_units(query, unit, units, count);
    int64_t settled = 0;  // rows whose groups have their score
    for (int64_t at = 0; at < retained;) {
      int64_t next = at + 1;
      while (next < retained && scratch_.retained[next] == scratch_.retained[next - 1] + 1) ++next;
      const int64_t unit_rows = unit * rows_a_group_;
      const int64_t first = scratch_.retained[at] * unit_rows;
      const Range range = {first, std::min((next - at) * unit_rows, rows_ - first)};
      leave_out(query, {settled, first - settled});
      add_rest(query, range);
      settle(query, range);
      settled = range.first + range.count;
      at = next;
    }
    leave_out(query, {settled, rows_ - settled});
  }

  /// Into scratch: the best by what is settled, in rising order. Returns how many.
  int64_t choose_units(int64_t query, int64_t unit, int64_t units, int64_t count) {
    scratch_.units.resize(units);
    scratch_.retained.resize(units);
    group_max({.scores = group_scores(query, 0),
               .group_scores = scratch_.units.data(),
               .tokens = rows_ / rows_a_group_,
               .group_tokens = unit});
    const int64_t retained = keep_best(units, count);
    ask_for_rest(unit * rows_a_group_, retained);
    return retained;
  }

  /// As top_k(), for a few: of equal scores the first.
  int64_t keep_best(int64_t units, int64_t count) {
    const float* scores = scratch_.units.data();
    float* order = scratch_.best.data();
    std::copy_n(scores, units, order);
    std::nth_element(order, order + count - 1, order + units, std::greater<>());
    const float last = order[count - 1];
    int64_t equals =
        count - std::count_if(order, order + count, [&](float score) { return score > last; });
    int64_t retained = 0;
    for (int64_t unit = 0; unit < units; ++unit) {
      const bool is_equal = scores[unit] == last && equals > 0;
      scratch_.retained[retained] = static_cast<int32_t>(unit);
      retained += (scores[unit] > last || is_equal) && scores[unit] > kNever;
      equals -= is_equal;
    }
    return retained;
  }

  /// Backwards: a processor that sees memory read upwards takes what lies between, too.
  void ask_for_rest(int64_t unit_rows, int64_t retained) const {
    constexpr int64_t kLine = 64;
    const int64_t unit_bytes = unit_rows * shape_.rest_columns() * dtype_bytes(shape_.dtype);
    for (int64_t line = (unit_bytes - 1) / kLine; line >= 0; --line) {
      for (int64_t i = retained - 1; i >= 0; --i) {
        __builtin_prefetch(source_.rest.data() + scratch_.retained[i] * unit_bytes + line * kLine);
      }
    }
  }

  void add_rest(int64_t query, Range range) const {
    scratch_.further.resize(args_.vectors * stride());
    const int64_t rest = shape_.rest_columns();
    multiply(source_.rest.data(), rest, asked_rest_ + query * args_.vectors * rest, args_.vectors,
             range, scratch_.further.data());
    for (int64_t vector = 0; vector < args_.vectors; ++vector) {
      float* target = products(query) + vector * stride() + range.first;
      const float* further = scratch_.further.data() + vector * stride();
      for (int64_t row = 0; row < range.count; ++row) target[row] += further[row];
    }
  }

  void leave_out(int64_t query, Range range) const {
    std::fill_n(group_scores(query, range.first), range.count / rows_a_group_, kNever);
  }

  const ProductArgs& args_;
  const KeySummary::Shape& shape_;
  const KeySummary::Chunk& source_;
  const KeySummary::Chunk* next_;  // stands elsewhere; null: none
  Scratch& scratch_;
  const float* asked_first_;  // [queries, vectors, first columns]
  const float* asked_rest_;   // [queries, vectors, the rest]
  int64_t rows_a_group_;
  int64_t first_row_;  // of the sequence's rows
  int64_t rows_;       // of the chunk
};

}  // namespace

void LogitScorer::score(std::span<const ProductArgs> sequences, const ParallelFor* parallel) {
  if (sequences.empty()) return;
  const ProductArgs& any = sequences.front();
  const KeySummary::Shape& shape = any.summary->shape();
  const int64_t vectors = any.queries * any.vectors;
  const int64_t first = shape.first_columns, rest = shape.rest_columns();
  asked_apart_.resize(sequences.size() * vectors * (first + rest));
  float* target = asked_apart_.data();
  for (const ProductArgs& args : sequences) {
    for (int64_t i = 0; i < vectors; ++i) {
      std::copy_n(args.asked + i * shape.rank, first, target + i * first);
      std::copy_n(args.asked + i * shape.rank + first, rest, target + vectors * first + i * rest);
    }
    target += vectors * (first + rest);
  }
  const int64_t rows = any.groups * (any.group_tokens / any.tokens_per_row);
  const int64_t chunks = ratio_up(rows, shape.chunk_tokens);
  const auto batch = static_cast<int64_t>(sequences.size());
  run_parallel({.parallel = parallel}, batch * chunks, 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    for (int64_t i = begin; i < end; ++i) {
      const float* apart = asked_apart_.data() + i / chunks * vectors * (first + rest);
      ChunkScorer(sequences[i / chunks], i % chunks, apart, scratch).run();
    }
  });
}

}  // namespace kvswap
