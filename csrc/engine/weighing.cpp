// What the queries of a window paid all tokens before them: found out by reading the layer's
// records.

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/keeping.h"

namespace kvswap {
namespace {

/// The log of the sum of what both are logs of.
float add_logs(float one, float other) {
  const float most = std::max(one, other);
  if (most == -std::numeric_limits<float>::infinity()) return most;
  return most + std::log1p(std::exp(std::min(one, other) - most));
}

}  // namespace

/// Decoded queries become the newest of each part's window.
void Keeping::take_queries(int64_t layer, const PagedAttentionArgs& attended) {
  const EngineOptions& options = parts_.options;
  const int64_t heads = options.query_heads;
  const int64_t bytes = dtype_bytes(options.dtype);
  for (int64_t part = 0; part < batch_.size(); ++part) {
    KeptTokens::Window& window = batch_.pages(part).kept(layer).window;
    const int64_t first_head = part % options.heads_apart * heads;
    const int64_t from = part / options.heads_apart * attended.query_batch_stride +
                         first_head * attended.query_head_stride;
    window.add({.queries = static_cast<const std::byte*>(attended.query) + from * bytes,
                .head_stride = attended.query_head_stride * bytes,
                .query_stride = attended.query_token_stride * bytes,
                .row_bytes = options.head_dim * bytes,
                .heads = heads,
                .count = attended.queries,
                .first_column = batch_.layer(layer).columns - attended.queries},
               options.keep_window);
    window.scale = attended.scale;
    window.softcap = attended.softcap;
    window.sinks.clear();
    if (attended.sinks == nullptr) continue;
    window.sinks.assign(attended.sinks + first_head, attended.sinks + first_head + heads);
  }
}

/// Reads the sealed groups, and calls `meet` for each block of them, which is listed.
Status Keeping::walk_sealed(int64_t layer, int64_t part, const MeetBlock& meet) {
  const int64_t sealed = batch_.layer(layer).sealed_groups;
  auto blocks = past_.blocks();
  if (!blocks.is_ok()) return blocks.status();
  const int64_t most = 2 * blocks.value().groups;
  const int64_t valid = batch_.validity(part).first_valid() / parts_.options.group_tokens;
  for (int64_t group = std::max(valid, parts_.store->first_group(layer, part)); group < sealed;
       group += most) {
    const PastReader::Groups groups = {layer, part, group, std::min(most, sealed - group)};
    std::byte* target = blocks.value().slots[0];
    KVSWAP_RETURN_IF_ERROR(past_.load(groups, target, blocks.value().memory));
    KVSWAP_RETURN_IF_ERROR(past_.list(groups, target, listed_));
    list_block(groups);
    meet(groups);
  }
  return Status::ok();
}

/// To tables of one block, whose pages are listed.
void Keeping::list_block(const PastReader::Groups& groups) {
  masks_.clear();
  columns_.clear();
  for (int64_t i = 0; i < groups.count; ++i) {
    masks_.push_back(batch_.mask(groups.layer, groups.sequence, groups.first + i));
    columns_.push_back(static_cast<int32_t>((groups.first + i) * parts_.options.group_tokens));
  }
  pages_.assign(listed_.pages.begin(), listed_.pages.end());
  page_count_ = static_cast<int32_t>(groups.count);
}

/// Queries of a window, from `first` on, over the listed block.
PagedAttentionArgs Keeping::asked(const KeptTokens::Window& window, int64_t first) {
  const EngineOptions& options = parts_.options;
  const int64_t query_bytes = options.head_dim * dtype_bytes(options.dtype);
  const int64_t slots = window.slots == 0 ? window.count : window.slots;
  query_column_ = static_cast<int32_t>(window.first_column + first);
  return {.query = window.queries.data() + window.slot(first) * query_bytes,
          .query_head_stride = slots * options.head_dim,
          .query_token_stride = options.head_dim,
          .log_sum_exp = log_sums_.data(),
          .pages = pages_.data(),
          .masks = masks_.data(),
          .columns = columns_.data(),
          .page_counts = &page_count_,
          .query_columns = &query_column_,
          .exponents = listed_.exponents.empty() ? nullptr : listed_.exponents.data(),
          .pages_max = page_count_,
          .batch = 1,
          .heads = options.query_heads,
          .queries = std::min(kChunkQueriesMax, window.in_a_row(first)),
          .scale = window.scale,
          .softcap = window.softcap,
          .shape = options.record_shape(),
          .dtype = options.dtype};
}

/// What the window's queries paid each sealed token, summed over them.
Status Keeping::weigh_past(int64_t layer, int64_t part) {
  const int64_t tokens = batch_.layer(layer).sealed_groups * parts_.options.group_tokens;
  KeptTokens& kept = batch_.pages(part).kept(layer);
  if (kept.window.log_sum_exp.empty()) {
    KVSWAP_RETURN_IF_ERROR(sum_past(layer, part));
  } else {
    window_sums_ = kept.window.log_sum_exp;
  }
  mass_of(kept).clear();
  grow(mass_of(kept), tokens);
  shape_ = {};
  overlap_.reset();
  if (parts_.options.shares_groups() && !kept.overlap) {
    overlap_.emplace(parts_.options.query_heads, parts_.options.selected_tokens());
  }
  weigh_left(layer, part);
  KVSWAP_RETURN_IF_ERROR(
      walk_sealed(layer, part, [&](const PastReader::Groups& groups) { weigh_block(groups); }));
  if (!parts_.options.keep_ratio) {
    kept.quality = shape_.quality(parts_.options.keep_temperatures);
  }
  if (overlap_) kept.overlap = overlap_->mean();
  return Status::ok();
}

/// The log-sum-exps of the window's queries, of all tokens that they see, to window_sums_.
Status Keeping::sum_past(int64_t layer, int64_t part) {
  const EngineOptions& options = parts_.options;
  const KeptTokens::Window& window = batch_.pages(part).kept(layer).window;
  window_sums_.assign(options.query_heads * window.count, -std::numeric_limits<float>::infinity());
  KVSWAP_RETURN_IF_ERROR(
      walk_sealed(layer, part, [&](const PastReader::Groups&) { sum_block(window); }));
  // What is newer stands in the tail.
  const Batch::Layer& state = batch_.layer(layer);
  const int64_t end = (state.columns + options.group_tokens - 1) / options.group_tokens;
  const PastReader::Groups newest = {layer, part, state.sealed_groups, end - state.sealed_groups};
  listed_.pages.clear();
  for (int64_t group = newest.first; group < end; ++group) {
    listed_.pages.push_back(tail_.page(layer, part, group));
  }
  listed_.exponents.assign(newest.count * options.note_bytes(), kNotFloat8);
  list_block(newest);
  if (newest.count > 0) sum_block(window);
  for (size_t i = 0; !window.sinks.empty() && i < window_sums_.size(); ++i) {
    window_sums_[i] = add_logs(window_sums_[i], window.sinks[i / window.count]);
  }
  return Status::ok();
}

void Keeping::sum_block(const KeptTokens::Window& window) {
  const EngineOptions& options = parts_.options;
  log_sums_.resize(options.query_heads * kChunkQueriesMax);
  output_.resize(log_sums_.size() * options.head_dim * dtype_bytes(options.dtype));
  for (int64_t first = 0; first < window.count;) {
    PagedAttentionArgs args = asked(window, first);
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

void Keeping::weigh_block(const PastReader::Groups& groups, const int32_t* columns) {
  const EngineOptions& options = parts_.options;
  KeptTokens& kept = batch_.pages(groups.sequence).kept(groups.layer);
  const KeptTokens::Window& window = kept.window;
  const int64_t tokens = groups.count * options.group_tokens;
  mean_.resize(options.kv_heads * tokens);
  square_.resize(weighs_heads() ? mean_.size() : 0);
  means_.assign(square_.size(), 0.0f);
  squares_.assign(square_.size(), 0.0f);
  std::vector<float>& mass = mass_of(kept);
  const auto column_of = [&](int64_t token) {
    return columns == nullptr ? groups.first * options.group_tokens + token : columns[token];
  };
  for (int64_t first = 0; first < window.count;) {
    const int64_t queries = std::min(kChunkQueriesMax, window.in_a_row(first));
    log_sums_.clear();
    for (int64_t head = 0; head < options.query_heads; ++head) {
      const float* of_head = window_sums_.data() + head * window.count + first;
      log_sums_.insert(log_sums_.end(), of_head, of_head + queries);
    }
    attention_mass({.attention = asked(window, first),
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
        mass[column_of(token)] += static_cast<float>(queries) * mean_[head * tokens + token];
      }
    }
  }
  for (size_t i = 0; i < square_.size(); ++i) {
    mass[column_of(static_cast<int64_t>(i) % tokens)] +=
        worth_of(means_[i], squares_[i], options.keep_variance);
  }
  if (overlap_) weigh_overlap(groups);
  if (options.keep_ratio) return;
  const int64_t before = window.first_column - groups.first * options.group_tokens;
  weigh_shape(columns == nullptr ? std::min(tokens, before) : tokens);
}

/// What the window's first and last query pay the tokens before it, each head alone.
void Keeping::weigh_overlap(const PastReader::Groups& groups) {
  const EngineOptions& options = parts_.options;
  const KeptTokens::Window& window = batch_.pages(groups.sequence).kept(groups.layer).window;
  const int64_t ratio = options.query_heads / options.kv_heads;
  const int64_t tokens = groups.count * options.group_tokens;
  const int64_t first_token = groups.first * options.group_tokens;
  for (const TopOverlap::Of which : {TopOverlap::Of::kFirst, TopOverlap::Of::kLast}) {
    const int64_t query = which == TopOverlap::Of::kFirst ? 0 : window.count - 1;
    for (int64_t of_group = 0; of_group < ratio; ++of_group) {
      PagedAttentionArgs args = asked(window, query);
      args.query = static_cast<const std::byte*>(args.query) +
                   of_group * args.query_head_stride * dtype_bytes(options.dtype);
      args.query_head_stride *= ratio;
      args.heads = options.kv_heads;
      args.queries = 1;
      log_sums_.clear();
      for (int64_t head = of_group; head < options.query_heads; head += ratio) {
        log_sums_.push_back(window_sums_[head * window.count + query]);
      }
      args.log_sum_exp = log_sums_.data();
      attention_mass({.attention = args, .mean = mean_.data()}, {.parallel = parts_.threads()});
      for (int64_t token = 0; token < std::min(tokens, window.first_column - first_token);
           ++token) {
        const uint64_t mask = masks_[token / options.group_tokens];
        if ((mask >> (token % options.group_tokens) & 1) == 0) continue;
        for (int64_t head = 0; head < options.kv_heads; ++head) {
          overlap_->add(head * ratio + of_group, which, static_cast<int32_t>(first_token + token),
                        mean_[head * tokens + token]);
        }
      }
    }
  }
}

/// Tokens of a layer that stay, whole groups, the same for all heads: PRKV (5).
int64_t Keeping::share_of(int64_t layer, int64_t part) const {
  const EngineOptions& options = parts_.options;
  const int64_t first = part / options.heads_apart * options.heads_apart;
  double agreed = 0;
  for (int64_t other = first; other < first + options.heads_apart; ++other) {
    // Without a prompt the paper's usual quarter.
    const double usual = 0.25 * static_cast<double>(options.selected_tokens());
    agreed += batch_.pages(other).kept(layer).overlap.value_or(usual);
  }
  const double groups = agreed / static_cast<double>(options.heads_apart * options.group_tokens);
  const auto tokens = static_cast<int64_t>(std::floor(groups)) * options.group_tokens;
  return std::min(tokens, options.keep_tokens / options.group_tokens * options.group_tokens);
}

/// How unevenly so many of the listed tokens were paid.
void Keeping::weigh_shape(int64_t count) {
  const EngineOptions& options = parts_.options;
  const int64_t tokens = page_count_ * options.group_tokens;
  for (int64_t token = 0; token < count; ++token) {
    const uint64_t mask = masks_[token / options.group_tokens];
    if ((mask >> (token % options.group_tokens) & 1) == 0) continue;
    double paid = 0;
    for (int64_t head = 0; head < options.kv_heads; ++head) paid += means_[head * tokens + token];
    shape_.add(paid);
  }
}

}  // namespace kvswap
