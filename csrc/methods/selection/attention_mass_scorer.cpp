#include "methods/selection/attention_mass_scorer.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numbers>
#include <span>
#include <vector>

#include "kernels/int4_rows.h"
#include "kernels/int8_mass.h"
#include "kernels/low_rank_score.h"
#include "methods/summary/summary_encoder.h"

namespace kvswap {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int64_t kHeadsAtOnce = 16;  // whose products of a chunk stay in the nearer caches

/// The tokens of a piece that are no candidates.
std::vector<int64_t> others_of(const Candidates& candidates, int64_t first_token, int64_t tokens,
                               int64_t group_tokens) {
  std::vector<int64_t> others;
  const PaddingMask& valid = *candidates.valid;
  const int64_t padded = std::min(tokens, valid.all_valid_from() - first_token);
  for (int64_t row = 0; row < padded; ++row) {
    if (!valid.is_valid(first_token + row)) others.push_back(row);
  }
  for (const int32_t group : candidates.excluded) {
    const int64_t begin = std::max<int64_t>(0, group * group_tokens - first_token);
    const int64_t end = std::min(tokens, (group + 1) * group_tokens - first_token);
    for (int64_t row = begin; row < end; ++row) others.push_back(row);
  }
  return others;
}

/// Of finite ones so large that their sums are not: no.
bool are_finite(std::span<const float> numbers) {
  constexpr size_t kLanes = 16;
  float sums[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= numbers.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) sums[lane] += numbers[i + lane];
  }
  for (size_t lane = 0; i < numbers.size(); ++i, ++lane) sums[lane] += numbers[i];
  return std::all_of(std::begin(sums), std::end(sums),
                     [](float sum) { return std::isfinite(sum); });
}

}  // namespace

/// How a sequence is cut: a piece is a chunk of its summary.
struct MassScorer::Pieces {
  int64_t count = 0;
  int64_t groups = 0;         // of a piece
  int64_t weight_stride = 0;  // between heads
  int64_t weights = 0;        // [count][heads, weight_stride]
  int64_t floats(int64_t heads) const;
};

MassScorer::Pieces MassScorer::pieces_of(int64_t heads, int64_t groups, int64_t group_tokens) {
  Pieces pieces;
  pieces.groups = chunk_rows(group_tokens, 1) / group_tokens;
  pieces.count = (groups + pieces.groups - 1) / pieces.groups;
  // Whole units, and a line more: else all heads would stand on the same lines of the cache.
  pieces.weight_stride = (pieces.groups + kMassUnit - 1) / kMassUnit * kMassUnit + kSummaryBlock;
  pieces.weights = pieces.count * heads * pieces.weight_stride;
  return pieces;
}

int64_t MassScorer::Pieces::floats(int64_t heads) const { return weights + 3 * count * heads; }

int64_t MassScorer::scratch_bytes(int64_t heads, int64_t rank, int64_t groups,
                                  int64_t group_tokens) {
  const int64_t floats = pieces_of(heads, groups, group_tokens).floats(heads) + heads;
  return floats * int64_t{sizeof(float)} + heads * int8_stride(rank);
}

void MassScorer::clear() {
  scratch_ = {};
  factors_ = {};
  int8_query_ = {};
}

/// The query as rows meet it, and what makes products of the two exponents of 2.
void MassScorer::prepare(const MassArgs& args) {
  const int64_t rank = args.summary->shape().rank;
  factors_.assign(args.heads, 1.0f);
  if (has_row_scales(args.summary->shape().dtype)) {
    int8_query_.resize(args.heads * int8_stride(rank));
    quantize_queries({.query = args.query,
                      .quantized = int8_query_.data(),
                      .scales = factors_.data(),
                      .rank = rank,
                      .queries = args.heads});
  } else {
    for (int64_t head = 0; head < args.heads; ++head) {
      if (!are_finite(std::span(args.query + head * rank, rank))) factors_[head] = NAN;
    }
  }
  for (float& factor : factors_) factor *= std::numbers::log2e_v<float>;
}

/// One chunk of the summary.
void MassScorer::weigh_piece(const MassArgs& args, int64_t piece, WeighGroupsArgs weigh) const {
  const KeySummary::Shape& shape = args.summary->shape();
  KVSWAP_ASSERT(weigh.tokens <= args.summary->chunk_rows(piece));
  const std::vector<int64_t> others =
      others_of(*args.candidates, piece * shape.chunk_tokens, weigh.tokens, weigh.group_tokens);
  const int64_t blocks = (weigh.tokens + kSummaryBlock - 1) / kSummaryBlock;
  const int8_t* int8_rows =
      as_int8_rows(shape.dtype, args.summary->chunk(piece).rows.data(), blocks, shape.rank);
  if (int8_rows && weigh_int8(args, piece, int8_rows, weigh, others)) return;
  weigh_products(args, piece, int8_rows, weigh, others);
}

/// In one pass; false: not here.
bool MassScorer::weigh_int8(const MassArgs& args, int64_t piece, const int8_t* int8_rows,
                            const WeighGroupsArgs& weigh,
                            const std::vector<int64_t>& others) const {
  std::vector<uint64_t> counted((weigh.tokens + kMassUnit - 1) / kMassUnit, ~uint64_t{0});
  for (const int64_t row : others) counted[row / 64] &= ~(uint64_t{1} << (row % 64));
  return int8_mass({.summary = int8_rows,
                    .token_scale = args.summary->chunk(piece).token_scale.data(),
                    .query = int8_query_.data(),
                    .factors = factors_.data(),
                    .counted = counted.data(),
                    .weights = weigh.weights,
                    .largest = weigh.largest,
                    .sums = weigh.sums,
                    .weight_stride = weigh.weight_stride,
                    .tokens = weigh.tokens,
                    .group_tokens = weigh.group_tokens,
                    .rank = args.summary->shape().rank,
                    .heads = args.heads});
}

/// Products of some heads at a time, then their weights.
void MassScorer::weigh_products(const MassArgs& args, int64_t piece, const int8_t* int8_rows,
                                WeighGroupsArgs weigh, const std::vector<int64_t>& others) const {
  // A whole power of two between heads would put them all on the same lines of the cache.
  const int64_t stride = args.summary->shape().chunk_tokens + kSummaryBlock;
  thread_local std::vector<float> products;  // [heads at once, stride]
  products.resize(kHeadsAtOnce * stride);
  weigh.products = products.data();
  weigh.product_stride = stride;
  weigh.has_gaps = !others.empty();
  for (int64_t head = 0; head < args.heads; head += kHeadsAtOnce) {
    weigh.heads = std::min(kHeadsAtOnce, args.heads - head);
    weigh.factors = factors_.data() + head;
    multiply(args, piece, int8_rows, weigh, head, products.data());
    // A row that is no number has no finite product with any head.
    if (head == 0) weigh.has_gaps |= !are_finite(std::span(products).first(weigh.tokens));
    for (int64_t i = 0; i < weigh.heads; ++i) {
      for (const int64_t row : others) products[i * stride + row] = kNever;
    }
    weigh_groups(weigh);
    weigh.weights += weigh.heads * weigh.weight_stride;
    weigh.largest += weigh.heads;
    weigh.sums += weigh.heads;
  }
}

void MassScorer::multiply(const MassArgs& args, int64_t piece, const int8_t* int8_rows,
                          const WeighGroupsArgs& weigh, int64_t head, float* products) const {
  const KeySummary::Chunk& source = args.summary->chunk(piece);
  const KeySummary::Shape& shape = args.summary->shape();
  const int64_t blocks = (weigh.tokens + kSummaryBlock - 1) / kSummaryBlock;
  if (int8_rows) {
    int8_score({.summary = int8_rows,
                .token_scale = source.token_scale.data(),
                .query = int8_query_.data() + head * int8_stride(shape.rank),
                .scores = products,
                .score_stride = weigh.product_stride,
                .blocks = blocks,
                .rank = shape.rank,
                .queries = weigh.heads});
  } else {
    low_rank_score({.summary = source.rows.data(),
                    .query = args.query + head * shape.rank,
                    .scores = products,
                    .score_stride = weigh.product_stride,
                    .blocks = blocks,
                    .rank = shape.rank,
                    .queries = weigh.heads,
                    .dtype = shape.dtype});
  }
}

void MassScorer::score(const MassArgs& args, int64_t group_tokens, float* group_scores) {
  const Pieces pieces = pieces_of(args.heads, args.groups, group_tokens);
  const auto floats = static_cast<size_t>(pieces.floats(args.heads));
  if (scratch_.size() < floats) {
    scratch_ = {};  // before the larger one comes
    scratch_.resize(floats);
  }
  float* largest = scratch_.data() + pieces.weights;  // [pieces, heads], as the next two
  float* sums = largest + pieces.count * args.heads;
  float* shares = sums + pieces.count * args.heads;
  prepare(args);
  const auto groups_in = [&](int64_t piece) {
    return std::min(pieces.groups, args.groups - piece * pieces.groups);
  };
  const auto weights_of = [&](int64_t piece) {
    return scratch_.data() + piece * pieces.weight_stride * args.heads;
  };
  const Execution execution{.parallel = args.parallel};
  run_parallel(execution, pieces.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      weigh_piece(args, piece,
                  {.weights = weights_of(piece),
                   .largest = largest + piece * args.heads,
                   .sums = sums + piece * args.heads,
                   .weight_stride = pieces.weight_stride,
                   .tokens = groups_in(piece) * group_tokens,
                   .group_tokens = group_tokens});
    }
  });
  mass_shares({.largest = largest,
               .sums = sums,
               .shares = shares,
               .pieces = pieces.count,
               .heads = args.heads});
  run_parallel(execution, pieces.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      join_heads({.weights = weights_of(piece),
                  .shares = shares + piece * args.heads,
                  .group_scores = group_scores + piece * pieces.groups,
                  .weight_stride = pieces.weight_stride,
                  .groups = groups_in(piece),
                  .heads = args.heads,
                  .join = args.join});
    }
  });
}

}  // namespace kvswap
