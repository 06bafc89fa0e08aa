#include "engine/window_weigher.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/attention_mass.h"
#include "kernels/record_codec.h"

namespace kvswap {
namespace {

/// The log of the sum of what both are logs of.
float add_logs(float one, float other) {
  const float most = std::max(one, other);
  if (most == -std::numeric_limits<float>::infinity()) return most;
  return most + std::log1p(std::exp(std::min(one, other) - most));
}

}  // namespace

void WindowWeigher::reserve(Arena& arena, const Plan& plan) {
  const EngineOptions& apart = plan.options;
  const KeepPlan& keep = plan.keep;
  if (keep.pages == 0) return;
  const int64_t block = 2 * plan.past_block_groups;
  const int64_t pages = block * (20 + plan.note_bytes);  // of WindowBlock, masks and positions
  // Means, and with a variance squares, of one call and of a window's.
  const bool has_sums = apart.keep_variance > 0 || !apart.keep_ratio || weighs_each(plan);
  const int64_t copies = has_sums ? 4 : 1;
  const int64_t mean =
      copies * block * apart.kv_heads * apart.group_tokens * int64_t{sizeof(float)};
  const int64_t log_sums =
      apart.query_heads * (kChunkQueriesMax + apart.keep_window) * int64_t{sizeof(float)};
  const int64_t output = keep.weighs_disk ? apart.query_heads * kChunkQueriesMax * apart.head_dim *
                                                dtype_bytes(apart.dtype)
                                          : 0;
  const int64_t agreed =
      keep.shares_groups ? TopOverlap::bytes(apart.query_heads, apart.selected_tokens()) : 0;
  const int64_t tail = (keep.weighs_disk || keep.kind.accumulates) && apart.device
                           ? plan.tail_pages * plan.group_bytes
                           : 0;
  arena.take(Use::kStaging, pages + mean + log_sums + output + agreed + tail);
}

Status WindowWeigher::weigh(int64_t layer, int64_t part, std::vector<float>& mass) {
  const EngineOptions& options = parts_.options;
  KeptTokens& kept = batch_.pages(part).kept(layer);
  if (kept.window.log_sum_exp.empty()) {
    KVSWAP_RETURN_IF_ERROR(sum_past(layer, part));
  } else {
    window_sums_ = kept.window.log_sum_exp;
  }
  const bool has_tail = parts_.keep.kind.accumulates;
  const Batch::Layer& state = batch_.layer(layer);
  const int64_t end = has_tail ? end_group(state) : state.sealed_groups;
  grow_mass(mass, end * options.group_tokens);
  shape_ = {};
  spread_ = {};
  overlap_.reset();
  if (parts_.keep.shares_groups && !kept.overlap) {
    overlap_.emplace(options.query_heads, options.selected_tokens());
  }
  const Block all = {.window = &kept.window, .layer = layer, .mass = mass.data()};
  weigh_left(layer, part, all);
  const auto weigh_groups = [&](const PastReader::Groups& groups) {
    Block block = all;
    block.first_token = groups.first * options.group_tokens;
    weigh_block(block);
  };
  KVSWAP_RETURN_IF_ERROR(walk_sealed(layer, part, weigh_groups));
  if (has_tail) KVSWAP_RETURN_IF_ERROR(walk_tail(layer, part, weigh_groups));
  if (!options.keep_ratio) kept.quality = shape_.quality(options.keep_temperatures);
  if (overlap_) kept.overlap = overlap_->mean();
  if (parts_.keep.kind.prefers_layers) kept.spread = spread_;
  return Status::ok();
}

/// Reads the sealed groups, and calls `meet` for each block of them.
Status WindowWeigher::walk_sealed(int64_t layer, int64_t part, const MeetBlock& meet) {
  const int64_t sealed = batch_.layer(layer).sealed_groups;
  auto blocks = past_.blocks();
  if (!blocks.is_ok()) return blocks.status();
  const int64_t most = 2 * blocks.value().groups;
  const int64_t valid = batch_.validity(part).first_valid() / parts_.options.group_tokens;
  for (int64_t group = std::max(valid, parts_.store->tables().first_group(layer, part));
       group < sealed; group += most) {
    const PastReader::Groups groups = {layer, part, group, std::min(most, sealed - group)};
    std::byte* target = blocks.value().slots[0];
    KVSWAP_RETURN_IF_ERROR(past_.load(groups, target, blocks.value().memory));
    KVSWAP_RETURN_IF_ERROR(past_.list(groups, target, block_.listed()));
    block_.take(groups, batch_);
    meet(groups);
  }
  return Status::ok();
}

/// The same of what is newer, which stands in the tail.
Status WindowWeigher::walk_tail(int64_t layer, int64_t part, const MeetBlock& meet) {
  const int64_t end = end_group(batch_.layer(layer));
  const int64_t most = 2 * parts_.plan.past_block_groups;
  tail_copies_.resize(std::min(most, parts_.plan.tail_pages));
  PastPages& listed = block_.listed();
  for (int64_t first = batch_.layer(layer).sealed_groups; first < end; first += most) {
    const PastReader::Groups groups = {layer, part, first, std::min(most, end - first)};
    listed.pages.clear();
    for (int64_t i = 0; i < groups.count; ++i) {
      auto page = parts_.space->compute().look_at(tail_.page(layer, part, first + i),
                                                  parts_.plan.group_bytes, tail_copies_[i]);
      if (!page.is_ok()) return page.status();
      listed.pages.push_back(page.value());
    }
    listed.exponents.assign(groups.count * parts_.plan.note_bytes, kNotFloat8);
    block_.take(groups, batch_);
    meet(groups);
  }
  return Status::ok();
}

/// The log-sum-exps of the window's queries, of all tokens that they see, to window_sums_.
Status WindowWeigher::sum_past(int64_t layer, int64_t part) {
  const EngineOptions& options = parts_.options;
  const QueryWindow& window = batch_.pages(part).kept(layer).window;
  window_sums_.assign(options.query_heads * window.count, -std::numeric_limits<float>::infinity());
  KVSWAP_RETURN_IF_ERROR(
      walk_sealed(layer, part, [&](const PastReader::Groups&) { sum_block(window); }));
  KVSWAP_RETURN_IF_ERROR(
      walk_tail(layer, part, [&](const PastReader::Groups&) { sum_block(window); }));
  for (size_t i = 0; !window.sinks.empty() && i < window_sums_.size(); ++i) {
    window_sums_[i] = add_logs(window_sums_[i], window.sinks[i / window.count]);
  }
  return Status::ok();
}

void WindowWeigher::sum_block(const QueryWindow& window) {
  const EngineOptions& options = parts_.options;
  log_sums_.resize(options.query_heads * kChunkQueriesMax);
  output_.resize(log_sums_.size() * options.head_dim * dtype_bytes(options.dtype));
  for (int64_t first = 0; first < window.count;) {
    PagedAttentionArgs args = block_.asked(window, first, log_sums_.data());
    args.output = output_.data();
    paged_attention(args, {.parallel = parts_.threads()});
    for (int64_t head = 0; head < options.query_heads; ++head) {
      for (int64_t query = 0; query < args.queries; ++query) {
        float& sum = window_sums_[head * window.count + first + query];
        sum = add_logs(sum, log_sums_[head * args.queries + query]);
      }
    }
    first += args.queries;
  }
}

/// Those whose records are gone.
void WindowWeigher::weigh_left(int64_t layer, int64_t part, Block block) {
  const EngineOptions& options = parts_.options;
  if (parts_.store->tables().first_group(layer, part) == 0) return;
  const LeftTokens& left = dropping_.left(layer, part);
  const int64_t pages = (left.count + options.group_tokens - 1) / options.group_tokens;
  const int64_t most = 2 * parts_.plan.past_block_groups;
  for (int64_t first = 0; first < pages; first += most) {
    block_.take(left, first, std::min(most, pages - first));
    block.positions = left.positions.data() + first * options.group_tokens;
    weigh_block(block);
  }
}

void WindowWeigher::weigh_block(const Block& block) {
  const EngineOptions& options = parts_.options;
  if (weighs_each(parts_.plan)) return weigh_each_head(block);
  const QueryWindow& window = *block.window;
  const int64_t tokens = block_.tokens();
  mean_.resize(options.kv_heads * tokens);
  square_.resize(weighs_heads() ? mean_.size() : 0);
  means_.assign(square_.size(), 0.0f);
  squares_.assign(square_.size(), 0.0f);
  for (int64_t first = 0; first < window.count;) {
    const int64_t queries = std::min(kChunkQueriesMax, window.in_a_row(first));
    log_sums_.clear();
    for (int64_t head = 0; head < options.query_heads; ++head) {
      const float* of_head = window_sums_.data() + head * window.count + first;
      log_sums_.insert(log_sums_.end(), of_head, of_head + queries);
    }
    attention_mass({.attention = block_.asked(window, first, log_sums_.data()),
                    .mean = mean_.data(),
                    .square = weighs_heads() ? square_.data() : nullptr},
                   {.parallel = parts_.threads()});
    first += queries;
    const float share = static_cast<float>(queries) / static_cast<float>(window.count);
    for (size_t i = 0; i < square_.size(); ++i) {
      means_[i] += share * mean_[i];
      squares_[i] += share * square_[i];
    }
    if (weighs_heads()) continue;
    for (int64_t head = 0; head < options.kv_heads; ++head) {
      for (int64_t token = 0; token < tokens; ++token) {
        block.mass[block.position(token)] +=
            static_cast<float>(queries) * mean_[head * tokens + token];
      }
    }
  }
  for (size_t i = 0; i < square_.size(); ++i) {
    block.mass[block.position(static_cast<int64_t>(i) % tokens)] +=
        worth_of(means_[i], squares_[i], options.keep_variance);
  }
  if (overlap_) weigh_overlap(block);
  if (!options.keep_ratio) weigh_shape(block);
}

/// What tokens are worth to each query head, summed over those that are asked: what its queries
/// paid, or CAKE (8), the mean of that and its variance.
void WindowWeigher::weigh_each_head(const Block& block) {
  const EngineOptions& options = parts_.options;
  const int64_t ratio = options.query_heads / options.kv_heads;
  const int64_t tokens = block_.tokens();
  for (int64_t of_group = 0; of_group < ratio; ++of_group) {
    means_.assign(options.kv_heads * tokens, 0.0f);
    squares_.assign(options.kv_heads * tokens, 0.0f);
    for (int64_t query = 0; query < block.window->count; ++query) {
      weigh_one(*block.window, query, of_group);
      for (size_t i = 0; i < means_.size(); ++i) {
        means_[i] += mean_[i];
        squares_[i] += mean_[i] * mean_[i];
        if (static_cast<int64_t>(i) % tokens < block.before(tokens)) spread_.add(mean_[i]);
      }
    }
    for (int64_t head = 0; head < options.kv_heads; ++head) {
      if (is_asked(block.layer, head * ratio + of_group)) add_worth_of_head(block, head);
    }
  }
}

void WindowWeigher::add_worth_of_head(const Block& block, int64_t kv_head) {
  const int64_t tokens = block_.tokens();
  const auto count = static_cast<float>(block.window->count);
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t place = kv_head * tokens + token;
    float worth = means_[place];
    if (parts_.keep.kind.prefers_layers) {
      const float mean = means_[place] / count;
      const float apart = std::max(0.0f, squares_[place] - means_[place] * mean);
      const float variance = count > 1 ? apart / (count - 1) : 0.0f;
      worth = mean + static_cast<float>(parts_.options.keep_variance) * variance;
      if (token < block.before(tokens)) spread_.change += variance;
    }
    block.mass[block.position(token)] += worth;
  }
}

bool WindowWeigher::is_asked(int64_t layer, int64_t head) const {
  const std::vector<int64_t>& heads = parts_.options.keep_heads;
  const int64_t number = layer * parts_.options.query_heads + head;
  return heads.empty() || std::binary_search(heads.begin(), heads.end(), number);
}

/// What one query of a window pays, of the same query head of each KV head, to mean_.
void WindowWeigher::weigh_one(const QueryWindow& window, int64_t query, int64_t of_group) {
  const EngineOptions& options = parts_.options;
  const int64_t ratio = options.query_heads / options.kv_heads;
  mean_.resize(options.kv_heads * block_.tokens());
  log_sums_.clear();
  for (int64_t head = of_group; head < options.query_heads; head += ratio) {
    log_sums_.push_back(window_sums_[head * window.count + query]);
  }
  PagedAttentionArgs args = block_.asked(window, query, log_sums_.data());
  args.query = static_cast<const std::byte*>(args.query) +
               of_group * args.query_head_stride * dtype_bytes(options.dtype);
  args.query_head_stride *= ratio;
  args.heads = options.kv_heads;
  args.queries = 1;
  attention_mass({.attention = args, .mean = mean_.data()}, {.parallel = parts_.threads()});
}

/// What the window's first and last query pay the tokens before it, each head alone.
void WindowWeigher::weigh_overlap(const Block& block) {
  const EngineOptions& options = parts_.options;
  const QueryWindow& window = *block.window;
  const int64_t ratio = options.query_heads / options.kv_heads;
  const int64_t tokens = block_.tokens();
  for (const TopOverlap::Of which : {TopOverlap::Of::kFirst, TopOverlap::Of::kLast}) {
    const int64_t query = which == TopOverlap::Of::kFirst ? 0 : window.count - 1;
    for (int64_t of_group = 0; of_group < ratio; ++of_group) {
      weigh_one(window, query, of_group);
      for (int64_t token = 0; token < block.before(tokens); ++token) {
        if (!block_.counts(token)) continue;
        for (int64_t head = 0; head < options.kv_heads; ++head) {
          overlap_->add(head * ratio + of_group, which, static_cast<int32_t>(block.position(token)),
                        mean_[head * tokens + token]);
        }
      }
    }
  }
}

/// How unevenly the block's tokens before the window were paid.
void WindowWeigher::weigh_shape(const Block& block) {
  const EngineOptions& options = parts_.options;
  const int64_t tokens = block_.tokens();
  for (int64_t token = 0; token < block.before(tokens); ++token) {
    if (!block_.counts(token)) continue;
    double paid = 0;
    for (int64_t head = 0; head < options.kv_heads; ++head) paid += means_[head * tokens + token];
    shape_.add(paid);
  }
}

}  // namespace kvswap
