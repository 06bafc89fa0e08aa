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

int64_t clustered_of(const ClusterTable& table) {
  return std::accumulate(table.size().begin(), table.size().end(), int64_t{0});
}

/// Fixed once: what is too wide stays the same while the row grows.
void settle_threshold(const ClusterTable& table, double factor, int64_t left,
                      SplitThreshold& threshold) {
  if (threshold.variance) return;
  const int64_t clustered = clustered_of(table);
  if (clustered < kThresholdTokens) return;
  double sum = 0;
  for (int64_t cluster = 0; cluster < table.count(); ++cluster) {
    sum += table.size()[cluster] * table.variance()[cluster];
  }
  threshold = {factor * (sum / static_cast<double>(clustered)), left};
}

/// A new cluster, which is listed.
int64_t add(ClusterTable& table, std::vector<int64_t>& made) {
  made.push_back(table.add());
  return made.back();
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

std::vector<int64_t> AdaptiveClusters::enter_prompt(const KeyRows& keys, int64_t end,
                                                    const Execution& execution) {
  made_.clear();
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
  std::vector<int64_t> made = std::exchange(made_, {});
  end_step();
  return made;
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
  made_.clear();
}

void AdaptiveClusters::truncate(int64_t tokens, const HasPages& has_pages) {
  const bool is_crop = tokens < left_;
  waiting_.truncate(tokens);
  const std::vector<int64_t> waited_for = waiting_.clusters();
  table_.truncate(is_crop ? tokens : std::ssize(table_.place()), [&](int64_t cluster) {
    return std::ranges::binary_search(waited_for, cluster) || has_pages(cluster);
  });
  if (!is_crop) return;
  left_ = tokens;
  end_step();
  if (tokens < threshold_.settled_at || clustered_of(table_) < kThresholdTokens) {
    threshold_ = {};
    settle_threshold(table_, options_.split_factor, left_, threshold_);
  }
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
  const auto first = std::ssize(made_);
  const auto usual = static_cast<int64_t>(tokens.size());
  const double share = static_cast<double>(usual) / static_cast<double>(options_.cluster_tokens);
  const int64_t wanted =
      std::min({std::max<int64_t>(1, std::llrint(share)), table_.numbers().left(), usual});
  if (wanted > 0) {
    for (const auto& part : parts_of(keys, tokens, wanted, execution)) {
      table_.set(add(table_, made_), keys, part);
    }
    tokens.clear();
  }
  left_ = end;
  tokens.insert(tokens.end(), others.begin(), others.end());
  enter_in_memory(keys, tokens);
  settle_threshold(table_, options_.split_factor, left_, threshold_);
  divide_block(keys, first);
}

void AdaptiveClusters::enter_in_memory(const KeyRows& keys, std::span<const int64_t> tokens) {
  for (const int64_t token : tokens) {
    enter_by(ClusterUpdate::kAdaptive, keys, token, [](int64_t) { return true; });
    std::fill(changed_.begin(), changed_.end(), false);
  }
}

void AdaptiveClusters::divide_block(const KeyRows& keys, int64_t first) {
  const std::vector<int64_t> made(made_.begin() + first, made_.end());
  for (const int64_t cluster : made) {
    if (table_.size()[cluster] > options_.cluster_tokens_max) {
      split(keys, cluster, members_of(*this, cluster));
    }
  }
  const int64_t most = std::min(table_.clusters_max(), options_.clusters_max(left_));
  const auto is_narrower = [&](int64_t a, int64_t b) {
    return table_.variance()[a] < table_.variance()[b];
  };
  while (threshold_.variance && std::ssize(made_) > first && table_.numbers().used() < most) {
    const auto widest = *std::max_element(made_.begin() + first, made_.end(), is_narrower);
    if (!(table_.variance()[widest] > *threshold_.variance)) break;
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
    counts_.refused += (table_.numbers().left() == 0) ? 1 : 0;
    open(keys, token);
  } else if (update == ClusterUpdate::kAdaptive) {
    enter_adaptive(keys, token, is_read);
    settle_threshold(table_, options_.split_factor, left_, threshold_);
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
  const bool fits = threshold_.variance
                        ? size < options_.cluster_tokens_max &&
                              table_.variance_with(cluster, keys.of(token)) <= *threshold_.variance
                        : size < options_.cluster_tokens;
  if (fits) {
    table_.join(cluster, keys, token);
  } else if (table_.numbers().left() == 0) {
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
  if (table_.numbers().left() == 0) {
    join_where_room_is(keys, token);
  } else {
    table_.set(add(table_, made_), keys, {&token, 1});
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
  const int64_t count = std::min(ClusterOptions::kLocalClusters, table_.numbers().left());
  if (count == 0) {
    for (const int64_t token : tokens) join_where_room_is(keys, token);
    return;
  }
  const auto parts = parts_of(keys, tokens, count, {});
  std::vector<int64_t> made;
  for (const auto& part : parts) {
    made.push_back(add(table_, made_));
    table_.set(made.back(), keys, part);
    changed_[made.back()] = true;
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    if (std::ssize(parts[i]) > options_.cluster_tokens_max) split(keys, made[i], parts[i]);
  }
}

void AdaptiveClusters::take_in(const KeyRows& keys, int64_t cluster) {
  const std::vector<int64_t> waited = waiting_.take(cluster);
  // After a crop they may be all that it has.
  if (table_.size()[cluster] == 0 && std::ssize(waited) <= options_.cluster_tokens_max) {
    table_.set(cluster, keys, waited);
    changed_[cluster] = true;
    return;
  }
  if (table_.numbers().left() == 0) {
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
  while (std::ssize(parts) <= table_.numbers().left()) {
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
    const int64_t to = i == 0 ? cluster : add(table_, made_);
    table_.set(to, keys, std::span(parts[i]).first(retained));
    changed_[to] = true;
    homeless.insert(homeless.end(), parts[i].begin() + retained, parts[i].end());
  }
  counts_.splits += static_cast<int64_t>(parts.size()) - 1;
  for (const int64_t token : homeless) join_where_room_is(keys, token);
}

}  // namespace kvswap
