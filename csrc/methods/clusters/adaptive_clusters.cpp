#include "methods/clusters/adaptive_clusters.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace kvswap {
namespace {

constexpr int64_t kThresholdTokens = 512;  // clustered before what is too wide is decided
constexpr int64_t kAnySize = std::numeric_limits<int64_t>::max();

/// By k-means.
std::vector<std::vector<int64_t>> parts_of(const KeyRows& keys, std::span<const int64_t> tokens,
                                           int64_t count, const Execution& execution) {
  const std::vector<int32_t> labels = k_means(keys, tokens, count, execution);
  std::vector<std::vector<int64_t>> parts(*std::max_element(labels.begin(), labels.end()) + 1);
  for (size_t i = 0; i < labels.size(); ++i) parts[labels[i]].push_back(tokens[i]);
  return parts;
}

/// Fixed once: what is too wide stays the same while the row grows.
void settle_threshold(const ClusterTable& table, double factor, std::optional<double>& threshold) {
  if (threshold) return;
  int64_t clustered = 0;
  double sum = 0;
  for (int64_t cluster = 0; cluster < table.count(); ++cluster) {
    clustered += table.size()[cluster];
    sum += table.size()[cluster] * table.variance()[cluster];
  }
  if (clustered < kThresholdTokens) return;
  threshold = factor * (sum / static_cast<double>(clustered));
}

bool is_usual(const KeyRows& keys, int64_t token) {
  return is_comparable({keys.of(token), static_cast<size_t>(keys.width)});
}

}  // namespace

AdaptiveClusters::AdaptiveClusters(int64_t width, int64_t tokens_max, const ClusterOptions& options)
    : options_(options),
      table_(width, tokens_max, options.clusters_max(tokens_max)),
      left_(std::min(options.sink_tokens, tokens_max)),
      changed_(table_.clusters_max()) {
  for (int64_t token = 0; token < left_; ++token) table_.put_outside(token, kInSinks);
}

int64_t AdaptiveClusters::bytes(int64_t width, int64_t tokens_max, const ClusterOptions& options) {
  const int64_t clusters = options.clusters_max(tokens_max);
  return ClusterTable::bytes(width, tokens_max, clusters) + (clusters + 7) / 8;
}

void AdaptiveClusters::grow(int64_t tokens_max) {
  if (tokens_max <= static_cast<int64_t>(table_.place().size())) return;
  table_.grow(tokens_max, options_.clusters_max(tokens_max));
  changed_.resize(table_.clusters_max());
}

void AdaptiveClusters::enter_prompt(const KeyRows& keys, int64_t end, const Execution& execution) {
  while (left_ < end) {
    const int64_t block = std::min(end - left_, options_.block_tokens);
    if (block >= options_.block_min()) {
      enter_block(keys, left_ + block, execution);
    } else {
      std::vector<int64_t> tokens(block);
      std::iota(tokens.begin(), tokens.end(), left_);
      enter_in_memory(keys, tokens);
    }
  }
  end_step();
}

std::vector<int64_t> AdaptiveClusters::enter(const KeyRows& keys, int64_t end,
                                             std::span<const int64_t> read) {
  Marks marks(table_.clusters_max());
  for (const int64_t cluster : read) marks[cluster] = true;
  const IsRead is_read = [&](int64_t cluster) { return marks[cluster]; };
  look_ahead(keys, end);
  for (int64_t token = left_; token < end; ++token) enter_token(keys, token, is_read);
  cluster_later(keys);
  for (const int64_t cluster : waiting_.clusters()) {
    if (is_read(cluster)) take_in(keys, cluster);
  }
  std::vector<int64_t> forced;
  while (waiting_.count() > 0 && waiting_.count() >= options_.waiting_max()) {
    forced.push_back(waiting_.most_waited_for());
    take_in(keys, forced.back());
    ++counts_.forced;
  }
  end_step();
  return forced;
}

std::vector<int64_t> AdaptiveClusters::changed() const {
  std::vector<int64_t> clusters;
  for (int64_t cluster = 0; cluster < table_.count(); ++cluster) {
    if (changed_[cluster]) clusters.push_back(cluster);
  }
  return clusters;
}

void AdaptiveClusters::end_step() {
  std::fill(changed_.begin(), changed_.end(), false);
  table_.forget_ahead();
}

void AdaptiveClusters::truncate(int64_t tokens) {
  if (tokens >= left_) return;
  left_ = tokens;
  table_.truncate(tokens);
  waiting_.truncate(tokens);
  end_step();
  if (table_.count() == 0) threshold_.reset();
  for (; left_ < std::min<int64_t>(options_.sink_tokens, table_.place().size()); ++left_) {
    put_outside(left_);
  }
}

void AdaptiveClusters::enter_block(const KeyRows& keys, int64_t end, const Execution& execution) {
  std::vector<int64_t> tokens, others;
  for (int64_t token = left_; token < end; ++token) {
    if (table_.place()[token] == kInSinks) continue;
    (is_usual(keys, token) ? tokens : others).push_back(token);
  }
  const int64_t first = table_.count();
  const auto usual = static_cast<int64_t>(tokens.size());
  const double share = static_cast<double>(usual) / static_cast<double>(options_.cluster_tokens);
  const int64_t wanted =
      std::min({std::max<int64_t>(1, std::llrint(share)), table_.clusters_max() - first, usual});
  if (wanted > 0) {
    for (const auto& part : parts_of(keys, tokens, wanted, execution)) {
      table_.set(table_.add(), keys, part);
    }
    tokens.clear();
  }
  left_ = end;
  tokens.insert(tokens.end(), others.begin(), others.end());
  enter_in_memory(keys, tokens);
  settle_threshold(table_, options_.split_factor, threshold_);
  divide_block(keys, first);
}

void AdaptiveClusters::enter_in_memory(const KeyRows& keys, std::span<const int64_t> tokens) {
  for (const int64_t token : tokens) {
    enter_by(ClusterUpdate::kAdaptive, keys, token, [](int64_t) { return true; });
    end_step();
  }
}

void AdaptiveClusters::divide_block(const KeyRows& keys, int64_t first) {
  const int64_t made = table_.count();
  for (int64_t cluster = first; cluster < made; ++cluster) {
    if (table_.size()[cluster] > options_.cluster_tokens_max) {
      split(keys, cluster, members_of(*this, cluster));
    }
  }
  const int64_t most = std::min(table_.clusters_max(), options_.clusters_max(left_));
  while (threshold_ && table_.count() > first && table_.count() < most) {
    const auto variance = table_.variance();
    const auto widest =
        std::max_element(variance.begin() + first, variance.end()) - variance.begin();
    if (!(variance[widest] > *threshold_)) break;
    split(keys, widest, members_of(*this, widest));
  }
}

void AdaptiveClusters::look_ahead(const KeyRows& keys, int64_t end) {
  if (options_.update == ClusterUpdate::kLocal) return;
  const bool is_adaptive = options_.update == ClusterUpdate::kAdaptive;
  std::vector<int64_t> tokens;
  for (int64_t token = left_; token < end; ++token) {
    if (table_.place()[token] != kInSinks && is_usual(keys, token)) tokens.push_back(token);
  }
  table_.look_ahead(keys, tokens, is_adaptive ? kAnySize : options_.cluster_tokens_max);
}

void AdaptiveClusters::enter_token(const KeyRows& keys, int64_t token, const IsRead& is_read) {
  enter_by(options_.update, keys, token, is_read);
}

void AdaptiveClusters::enter_by(ClusterUpdate update, const KeyRows& keys, int64_t token,
                                const IsRead& is_read) {
  left_ = std::max(left_, token + 1);
  if (table_.place()[token] == kInSinks) return;
  if (!is_usual(keys, token)) {
    counts_.refused += table_.is_full() ? 1 : 0;
    open(keys, token);
  } else if (update == ClusterUpdate::kAdaptive) {
    enter_adaptive(keys, token, is_read);
    settle_threshold(table_, options_.split_factor, threshold_);
  } else if (update == ClusterUpdate::kLocal) {
    table_.put_outside(token, kIsPending);
    waiting_.add(PendingTokens::kNoCluster, token);
  } else {
    const int64_t cluster = table_.nearest(keys, token, options_.cluster_tokens_max);
    cluster < 0 ? open(keys, token) : table_.hold(cluster, token);
  }
}

void AdaptiveClusters::enter_adaptive(const KeyRows& keys, int64_t token, const IsRead& is_read) {
  const int64_t cluster = table_.nearest(keys, token, kAnySize);
  if (cluster < 0) return open(keys, token);
  const int64_t size = table_.size()[cluster];
  const bool fits = threshold_ ? size < options_.cluster_tokens_max &&
                                     table_.variance_with(cluster, keys.of(token)) <= *threshold_
                               : size < options_.cluster_tokens;
  if (fits) {
    table_.join(cluster, keys, token);
  } else if (table_.is_full()) {
    ++counts_.refused;
    join_where_room_is(keys, token);
  } else if (!changed_[cluster] && is_read(cluster)) {
    std::vector<int64_t> tokens = members_of(*this, cluster);
    tokens.push_back(token);
    split(keys, cluster, std::move(tokens));
  } else {
    table_.put_outside(token, kIsPending);
    waiting_.add(cluster, token);
  }
}

void AdaptiveClusters::open(const KeyRows& keys, int64_t token) {
  if (table_.is_full()) {
    join_where_room_is(keys, token);
  } else {
    table_.set(table_.add(), keys, {&token, 1});
  }
}

/// There is one that is not full, as the number of clusters is made.
void AdaptiveClusters::join_where_room_is(const KeyRows& keys, int64_t token) {
  const int64_t most = options_.cluster_tokens_max;
  int64_t cluster = is_usual(keys, token) ? table_.nearest(keys, token, most) : -1;
  if (cluster < 0) {
    const auto sizes = table_.size();
    cluster = std::find_if(sizes.begin(), sizes.end(), [&](int32_t n) { return n < most; }) -
              sizes.begin();
  }
  is_usual(keys, token) ? table_.join(cluster, keys, token) : table_.hold(cluster, token);
}

void AdaptiveClusters::cluster_later(const KeyRows& keys) {
  const bool is_due =
      options_.update == ClusterUpdate::kLocal && waiting_.count() >= options_.waiting_max();
  if (!is_due) return;
  const std::vector<int64_t> tokens = waiting_.take(PendingTokens::kNoCluster);
  const int64_t first = table_.count();
  const int64_t count = std::min(ClusterOptions::kLocalClusters, table_.clusters_max() - first);
  if (count == 0) {
    for (const int64_t token : tokens) join_where_room_is(keys, token);
    return;
  }
  const auto parts = parts_of(keys, tokens, count, {});
  for (const auto& part : parts) {
    const int64_t cluster = table_.add();
    table_.set(cluster, keys, part);
    changed_[cluster] = true;
  }
  for (int64_t i = 0; i < std::ssize(parts); ++i) {
    if (std::ssize(parts[i]) > options_.cluster_tokens_max) split(keys, first + i, parts[i]);
  }
}

void AdaptiveClusters::take_in(const KeyRows& keys, int64_t cluster) {
  const std::vector<int64_t> waited = waiting_.take(cluster);
  if (table_.is_full()) {
    ++counts_.refused;
    for (const int64_t token : waited) join_where_room_is(keys, token);
    return;
  }
  std::vector<int64_t> tokens = members_of(*this, cluster);
  tokens.insert(tokens.end(), waited.begin(), waited.end());
  std::sort(tokens.begin(), tokens.end());
  split(keys, cluster, std::move(tokens));
}

void AdaptiveClusters::split(const KeyRows& keys, int64_t cluster, std::vector<int64_t> tokens) {
  const auto most = static_cast<size_t>(options_.cluster_tokens_max);
  const auto smaller = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  std::vector<std::vector<int64_t>> parts{std::move(tokens)};
  while (table_.count() + static_cast<int64_t>(parts.size()) <= table_.clusters_max()) {
    const auto largest = std::max_element(parts.begin(), parts.end(), smaller);
    if (parts.size() > 1 && largest->size() <= most) break;
    const std::vector<int64_t> part = std::move(*largest);
    parts.erase(largest);
    const std::vector<bool> is_second = split_in_two(keys, part);
    std::vector<int64_t> halves[2];
    for (size_t i = 0; i < part.size(); ++i) halves[is_second[i]].push_back(part[i]);
    for (auto& half : halves) parts.push_back(std::move(half));
  }
  std::stable_sort(parts.begin(), parts.end(),
                   [&](const auto& a, const auto& b) { return smaller(b, a); });
  std::vector<int64_t> homeless;
  const auto is_member = [&](int64_t token) { return table_.place()[token] == cluster; };
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].size() > most) std::stable_partition(parts[i].begin(), parts[i].end(), is_member);
    const size_t retained = std::min(parts[i].size(), most);
    const int64_t to = i == 0 ? cluster : table_.add();
    table_.set(to, keys, std::span(parts[i]).first(retained));
    changed_[to] = true;
    homeless.insert(homeless.end(), parts[i].begin() + retained, parts[i].end());
  }
  counts_.splits += static_cast<int64_t>(parts.size()) - 1;
  for (const int64_t token : homeless) join_where_room_is(keys, token);
}

}  // namespace kvswap
