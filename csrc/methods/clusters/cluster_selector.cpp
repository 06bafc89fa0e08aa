#include "methods/clusters/cluster_selector.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/low_rank_score.h"
#include "methods/summary/summary_memory.h"

namespace kvswap {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

/// products[cluster] to the share of the softmax that the cluster's tokens have together.
void to_mass(std::span<float> products, std::span<const int32_t> sizes,
             const std::vector<bool>& has_pages) {
  float most = kNever;
  for (size_t c = 0; c < sizes.size(); ++c) {
    if (has_pages[c]) most = std::max(most, products[c]);
  }
  double sum = 0;
  for (size_t c = 0; c < sizes.size(); ++c) {
    if (!has_pages[c]) continue;
    products[c] = static_cast<float>(sizes[c]) * std::exp(products[c] - most);
    sum += products[c];
  }
  const auto scale = static_cast<float>(1.0 / sum);
  for (size_t c = 0; c < sizes.size(); ++c) products[c] *= scale;
}

}  // namespace

ClusterSelector::ClusterSelector(const MethodOptions& options)
    : options_(options),
      none_(options_),
      centroids_(options_),
      summaries_(options_, none_, make_host_summary_memory()),
      rows_(options_) {}

Status ClusterSelector::set_projection(int64_t layer, int64_t, const float*, const float*) {
  return Status::invalid("set_projection: layer " + std::to_string(layer) +
                         " must have a summary.kind that takes projections (low_rank), and has "
                         "centroids");
}

Status ClusterSelector::give_scores(int64_t layer, const UserScores&) {
  return Status::invalid("give_scores: layer " + std::to_string(layer) +
                         " must have summary.kind user to take scores, and scores its centroids");
}

int64_t ClusterSelector::scratch_bytes(const MethodOptions& options, int64_t batch,
                                       int64_t clusters) {
  const int64_t asked = options.score == Score::kSum ? 1 : options.heads;
  const int64_t lanes = (clusters + kSummaryBlock - 1) / kSummaryBlock * kSummaryBlock;
  const int64_t width = options.kv_heads * options.head_dim;
  // Products by head, what they come to, and the order of that.
  return batch * (asked * width * int64_t{sizeof(float)} +
                  lanes * ((asked + 1) * int64_t{sizeof(float)} + int64_t{sizeof(int32_t)} + 1));
}

void ClusterSelector::choose(const ChooseArgs& args) {
  KVSWAP_ASSERT(args.chosen != nullptr);
  const int64_t batch = rows_.sequences();
  const int64_t width = options_.kv_heads * options_.head_dim;
  args.chosen->resize(batch);
  for (std::vector<int32_t>& chosen : *args.chosen) chosen.clear();
  for (int64_t query = 0; query < args.query.queries; ++query) {
    QueryView one = args.query;
    one.data = args.query.at(0, 0, query);
    one.queries = 1;
    asked_.resize(batch * asked_a_query() * width);
    options_.score == Score::kSum
        ? centroids_.ask(args.layer, one, batch, asked_.data())
        : centroids_.ask_each_head(args.layer, one, batch, args.scale, asked_.data());
    const auto choose_some = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) choose_for(args, i);
    };
    options_.parallel != nullptr ? (*options_.parallel)(batch, 1, choose_some)
                                 : serial_for(batch, 1, choose_some);
  }
  for (std::vector<int32_t>& chosen : *args.chosen) {
    std::sort(chosen.begin(), chosen.end());
    chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  }
}

/// Adds what one query chooses.
void ClusterSelector::choose_for(const ChooseArgs& args, int64_t sequence) const {
  const ClusterRow& row = rows_.of(args.layer, sequence);
  thread_local std::vector<float> scores;
  const int64_t width = options_.kv_heads * options_.head_dim;
  score(row, asked_.data() + sequence * asked_a_query() * width, scores);
  std::vector<int32_t> order(row.clusters.table().count());
  std::iota(order.begin(), order.end(), 0);
  std::erase_if(order, [&](int32_t cluster) { return row.pages.pages(cluster) == 0; });
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  });
  std::vector<int32_t>& chosen = (*args.chosen)[sequence];
  int64_t left = args.groups_per_query;
  for (const int32_t cluster : order) {
    const bool is_first = left == args.groups_per_query;
    if (row.pages.pages(cluster) > left && !is_first) break;
    row.pages.each_page(cluster, [&](int64_t slot) {
      if (left-- > 0) chosen.push_back(page_id(slot));
    });
    if (left <= 0) break;
  }
}

/// What each cluster is worth that has pages: [clusters].
void ClusterSelector::score(const ClusterRow& row, const float* asked,
                            std::vector<float>& scores) const {
  const ClusterTable& table = row.clusters.table();
  const int64_t count = table.count();
  const int64_t blocks = (count + kSummaryBlock - 1) / kSummaryBlock;
  const int64_t stride = blocks * kSummaryBlock;
  thread_local std::vector<float> products;  // [asked_a_query, stride]
  products.resize(asked_a_query() * stride);
  low_rank_score({.summary = table.centroids(),
                  .query = asked,
                  .scores = products.data(),
                  .score_stride = stride,
                  .blocks = blocks,
                  .rank = table.width(),
                  .queries = asked_a_query()});
  const bool is_by_mass = options_.score == Score::kMass || options_.score == Score::kMaxMass;
  std::vector<bool> has_pages(count);
  for (int64_t c = 0; c < count; ++c) has_pages[c] = row.pages.pages(c) > 0;
  for (int64_t head = 0; is_by_mass && head < asked_a_query(); ++head) {
    to_mass({products.data() + head * stride, static_cast<size_t>(count)}, table.size(), has_pages);
  }
  scores.assign(products.begin(), products.begin() + count);
  for (int64_t head = 1; head < asked_a_query(); ++head) {
    const float* of_head = products.data() + head * stride;
    for (int64_t c = 0; c < count; ++c) {
      scores[c] =
          options_.score == Score::kMass ? scores[c] + of_head[c] : std::max(scores[c], of_head[c]);
    }
  }
  // As groups: what is no number comes first, and has an order.
  for (float& score : scores) {
    if (std::isnan(score)) score = std::numeric_limits<float>::infinity();
  }
}

void ClusterSelector::clear() {
  rows_.set_sequences(0);
  summaries_.set_sequences(0);
  asked_ = {};
}

}  // namespace kvswap
