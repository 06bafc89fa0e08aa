#include "engine/retention/observation_scorer.h"

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

void ObservationScorer::reserve(Arena& arena, const Plan& plan) {
  const EngineOptions& apart = plan.options;
  const RetentionPlan& retention = plan.retention;
  if (retention.pages == 0) return;
  const int64_t block = 2 * plan.past_block_groups;
  const int64_t pages = block * (20 + plan.note_bytes);  // of ObservationBlock, masks and positions
  // Means, and with a variance squares, of one call and of a window's.
  const bool has_sums = retention.policy->needs_squares() || !apart.keep_ratio ||
                        retention.policy->scores_query_heads();
  const int64_t copies = has_sums ? 4 : 1;
  const int64_t mean =
      copies * block * apart.kv_heads * apart.group_tokens * int64_t{sizeof(float)};
  const int64_t log_sums =
      apart.query_heads * (kChunkQueriesMax + apart.keep_window) * int64_t{sizeof(float)};
  const int64_t output = retention.scores_all_tokens ? apart.query_heads * kChunkQueriesMax *
                                                           apart.head_dim * dtype_bytes(apart.dtype)
                                                     : 0;
  const int64_t agreed =
      retention.shares_groups ? TopKOverlap::bytes(apart.query_heads, apart.selected_tokens()) : 0;
  const int64_t tail = (retention.scores_all_tokens || retention.kind.accumulates) && apart.device
                           ? plan.tail_pages * plan.group_bytes
                           : 0;
  arena.take(Use::kStaging, pages + mean + log_sums + output + agreed + tail);
}

Status ObservationScorer::score(int64_t layer, int64_t sequence, std::vector<float>& mass) {
  const EngineOptions& options = context_.options;
  RetainedTokens& retained = batch_.pages(sequence).retained(layer);
  if (retained.window.log_sum_exp.empty()) {
    KVSWAP_RETURN_IF_ERROR(sum_past(layer, sequence));
  } else {
    window_sums_ = retained.window.log_sum_exp;
  }
  const bool has_tail = context_.retention.kind.accumulates;
  const Batch::Layer& state = batch_.layer(layer);
  const int64_t end = has_tail ? end_group(state) : state.sealed_groups;
  grow_mass(mass, end * options.group_tokens);
  shape_ = {};
  spread_ = {};
  overlap_.reset();
  if (context_.retention.shares_groups && !retained.overlap) {
    overlap_.emplace(options.query_heads, options.selected_tokens());
  }
  const Block all = {.window = &retained.window, .layer = layer, .mass = mass.data()};
  score_survivors(layer, sequence, all);
  const auto weigh_groups = [&](const PrefixReader::Groups& groups) {
    Block block = all;
    block.first_token = groups.first * options.group_tokens;
    score_block(block);
  };
  KVSWAP_RETURN_IF_ERROR(walk_sealed(layer, sequence, weigh_groups));
  if (has_tail) KVSWAP_RETURN_IF_ERROR(walk_tail(layer, sequence, weigh_groups));
  if (!options.keep_ratio) retained.quality = shape_.quality(options.keep_temperatures);
  if (overlap_) retained.overlap = overlap_->mean();
  if (context_.retention.kind.divides_layers) retained.spread = spread_;
  return Status::ok();
}

/// Reads the sealed groups, and calls `meet` for each block of them.
Status ObservationScorer::walk_sealed(int64_t layer, int64_t sequence, const MeetBlock& meet) {
  const int64_t sealed = batch_.layer(layer).sealed_groups;
  auto blocks = past_.blocks();
  if (!blocks.is_ok()) return blocks.status();
  const int64_t most = 2 * blocks.value().groups;
  const int64_t valid = batch_.validity(sequence).first_valid() / context_.options.group_tokens;
  for (int64_t group = std::max(valid, context_.store->tables().first_group(layer, sequence));
       group < sealed; group += most) {
    const PrefixReader::Groups groups = {layer, sequence, group, std::min(most, sealed - group)};
    std::byte* target = blocks.value().slots[0];
    KVSWAP_RETURN_IF_ERROR(past_.load(groups, target, blocks.value().memory));
    KVSWAP_RETURN_IF_ERROR(past_.list(groups, target, block_.listed()));
    block_.take(groups, batch_);
    meet(groups);
  }
  return Status::ok();
}

/// The same of what is newer, which stands in the tail.
Status ObservationScorer::walk_tail(int64_t layer, int64_t sequence, const MeetBlock& meet) {
  const int64_t end = end_group(batch_.layer(layer));
  const int64_t most = 2 * context_.plan.past_block_groups;
  tail_copies_.resize(std::min(most, context_.plan.tail_pages));
  PrefixPages& listed = block_.listed();
  for (int64_t first = batch_.layer(layer).sealed_groups; first < end; first += most) {
    const PrefixReader::Groups groups = {layer, sequence, first, std::min(most, end - first)};
    listed.pages.clear();
    for (int64_t i = 0; i < groups.count; ++i) {
      auto page =
          context_.space->compute().map_for_host(batch_.pages(sequence).tail_page(layer, first + i),
                                                 context_.plan.group_bytes, tail_copies_[i]);
      if (!page.is_ok()) return page.status();
      listed.pages.push_back(page.value());
    }
    listed.exponents.assign(groups.count * context_.plan.note_bytes, kNotFloat8);
    block_.take(groups, batch_);
    meet(groups);
  }
  return Status::ok();
}

/// The log-sum-exps of the window's queries, of all tokens that they see, to window_sums_.
Status ObservationScorer::sum_past(int64_t layer, int64_t sequence) {
  const EngineOptions& options = context_.options;
  const ObservationWindow& window = batch_.pages(sequence).retained(layer).window;
  window_sums_.assign(options.query_heads * window.count, -std::numeric_limits<float>::infinity());
  KVSWAP_RETURN_IF_ERROR(
      walk_sealed(layer, sequence, [&](const PrefixReader::Groups&) { sum_block(window); }));
  KVSWAP_RETURN_IF_ERROR(
      walk_tail(layer, sequence, [&](const PrefixReader::Groups&) { sum_block(window); }));
  for (size_t i = 0; !window.sinks.empty() && i < window_sums_.size(); ++i) {
    window_sums_[i] = add_logs(window_sums_[i], window.sinks[i / window.count]);
  }
  return Status::ok();
}

void ObservationScorer::sum_block(const ObservationWindow& window) {
  const EngineOptions& options = context_.options;
  log_sums_.resize(options.query_heads * kChunkQueriesMax);
  output_.resize(log_sums_.size() * options.head_dim * dtype_bytes(options.dtype));
  for (int64_t first = 0; first < window.count;) {
    PagedAttentionArgs args = block_.asked(window, first, log_sums_.data());
    args.output = output_.data();
    paged_attention(args, {.parallel = context_.threads()});
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
void ObservationScorer::score_survivors(int64_t layer, int64_t sequence, Block block) {
  const EngineOptions& options = context_.options;
  if (context_.store->tables().first_group(layer, sequence) == 0) return;
  const SurvivingTokens& left = eviction_.left(layer, sequence);
  const int64_t pages = (left.count + options.group_tokens - 1) / options.group_tokens;
  const int64_t most = 2 * context_.plan.past_block_groups;
  for (int64_t first = 0; first < pages; first += most) {
    block_.take(left, first, std::min(most, pages - first));
    block.positions = left.positions.data() + first * options.group_tokens;
    score_block(block);
  }
}

void ObservationScorer::score_block(const Block& block) {
  const EngineOptions& options = context_.options;
  const RetentionPolicy& policy = *context_.retention.policy;
  if (policy.scores_query_heads()) return score_each_head(block);
  const ObservationWindow& window = *block.window;
  const int64_t tokens = block_.tokens();
  mean_.resize(options.kv_heads * tokens);
  square_.resize(scores_heads() ? mean_.size() : 0);
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
                    .square = scores_heads() ? square_.data() : nullptr},
                   {.parallel = context_.threads()});
    first += queries;
    const float share = static_cast<float>(queries) / static_cast<float>(window.count);
    for (size_t i = 0; i < square_.size(); ++i) {
      means_[i] += share * mean_[i];
      squares_[i] += share * square_[i];
    }
    if (scores_heads()) continue;
    for (float& mean : mean_) mean *= static_cast<float>(queries);
    for (int64_t head = 0; head < options.kv_heads; ++head) {
      policy.add_scores({.layer = block.layer,
                         .head = head,
                         .samples = queries,
                         .sums = std::span(mean_).subspan(head * tokens, tokens)},
                        block.scores());
    }
  }
  for (int64_t head = 0; scores_heads() && head < options.kv_heads; ++head) {
    policy.add_scores({.layer = block.layer,
                       .head = head,
                       .sums = std::span(means_).subspan(head * tokens, tokens),
                       .squares = std::span(squares_).subspan(head * tokens, tokens)},
                      block.scores());
  }
  if (overlap_) score_overlap(block);
  if (!options.keep_ratio) score_shape(block);
}

/// The same of each query head for itself.
void ObservationScorer::score_each_head(const Block& block) {
  const EngineOptions& options = context_.options;
  const int64_t ratio = options.query_heads / options.kv_heads;
  const int64_t tokens = block_.tokens();
  for (int64_t of_group = 0; of_group < ratio; ++of_group) {
    means_.assign(options.kv_heads * tokens, 0.0f);
    squares_.assign(options.kv_heads * tokens, 0.0f);
    for (int64_t query = 0; query < block.window->count; ++query) {
      score_query(*block.window, query, of_group);
      for (size_t i = 0; i < means_.size(); ++i) {
        means_[i] += mean_[i];
        squares_[i] += mean_[i] * mean_[i];
        if (static_cast<int64_t>(i) % tokens < block.before(tokens)) spread_.add(mean_[i]);
      }
    }
    for (int64_t head = 0; head < options.kv_heads; ++head) {
      add_scores_of_head(block, head, of_group);
    }
  }
}

void ObservationScorer::add_scores_of_head(const Block& block, int64_t kv_head, int64_t of_group) {
  const EngineOptions& options = context_.options;
  const int64_t tokens = block_.tokens();
  const HeadAttention attention = {
      .layer = block.layer,
      .head = kv_head * (options.query_heads / options.kv_heads) + of_group,
      .samples = block.window->count,
      .sums = std::span(means_).subspan(kv_head * tokens, tokens),
      .squares = std::span(squares_).subspan(kv_head * tokens, tokens)};
  context_.retention.policy->add_scores(attention, block.scores());
  if (!context_.retention.kind.divides_layers) return;
  for (int64_t token = 0; token < block.before(tokens); ++token) {
    spread_.change += sample_variance(attention, token);
  }
}

/// Attention of one query of a window, of the same query head of each KV head, to mean_.
void ObservationScorer::score_query(const ObservationWindow& window, int64_t query,
                                    int64_t of_group) {
  const EngineOptions& options = context_.options;
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
  attention_mass({.attention = args, .mean = mean_.data()}, {.parallel = context_.threads()});
}

/// Attention of the window's first and last query on the tokens before it, each head alone.
void ObservationScorer::score_overlap(const Block& block) {
  const EngineOptions& options = context_.options;
  const ObservationWindow& window = *block.window;
  const int64_t ratio = options.query_heads / options.kv_heads;
  const int64_t tokens = block_.tokens();
  for (const TopKOverlap::Of which : {TopKOverlap::Of::kFirst, TopKOverlap::Of::kLast}) {
    const int64_t query = which == TopKOverlap::Of::kFirst ? 0 : window.count - 1;
    for (int64_t of_group = 0; of_group < ratio; ++of_group) {
      score_query(window, query, of_group);
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

/// How unevenly the block's tokens before the window are attended.
void ObservationScorer::score_shape(const Block& block) {
  const EngineOptions& options = context_.options;
  const int64_t tokens = block_.tokens();
  for (int64_t token = 0; token < block.before(tokens); ++token) {
    if (!block_.counts(token)) continue;
    double received = 0;
    for (int64_t head = 0; head < options.kv_heads; ++head)
      received += means_[head * tokens + token];
    shape_.add(received);
  }
}

}  // namespace kvswap
