#include "engine/step/recall_audit.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "methods/clusters/cluster_selector.h"

namespace kvswap {

void MissedMass::add(double share) {
  ++looks;
  sum += share;
  sum_of_squares += share * share;
}

double MissedMass::variance() const {
  if (looks < 2) return 0;
  const auto count = static_cast<double>(looks);
  return std::max(0.0, sum_of_squares - sum * sum / count) / (count - 1) / count;
}

void RecallAudit::reserve(Arena& arena, const Plan& plan, const Extent& extent) {
  const EngineOptions& apart = plan.options;
  if (apart.steps_between_looks() == 0) return;
  const int64_t heads = apart.query_heads * apart.heads_apart;
  const int64_t queries = apart.select_queries_max;
  // Pages, masks, positions, counts, a load's, exponents.
  const int64_t tables = apart.heads_apart * (28 + plan.note_bytes) + 4;
  arena.take(
      Use::kStaging,
      apart.audit_groups *
          (apart.heads_apart * (plan.record_bytes + Fetch::bytes_per_load()) + tables +
           queries * heads * (int64_t{sizeof(float)} + apart.head_dim * dtype_bytes(apart.dtype))));
  arena.take(Use::kScratch,
             size_product({extent.batch, apart.query_heads, queries, int64_t{sizeof(float)}}));
}

/// Layers take refreshes, so that no step is much longer than another.
bool RecallAudit::is_due(int64_t layer) {
  const EngineOptions& options = context_.options;
  const int64_t every = options.steps_between_looks();
  if (every == 0 || batch_.all_fit(layer)) return false;
  steps_.resize(options.layers);
  const int64_t refresh = steps_[layer]++ + layer * every / options.layers + 1;
  if (refresh % every != 0) return false;
  const int64_t sequences = batch_.size() / options.heads_apart;
  first_part_ = refresh / every % sequences * options.heads_apart;
  return true;
}

Status RecallAudit::make_memory() {
  if (memory_ != nullptr) return Status::ok();
  const EngineOptions& options = context_.options;
  const int64_t entries = options.audit_groups * options.heads_apart;
  auto memory = context_.space->landing().make_landing(entries * context_.record_bytes());
  if (!memory.is_ok()) return memory.status();
  memory_ = std::move(memory.value());
  pages_.resize(entries);
  masks_.resize(entries);
  positions_.resize(entries);
  counts_.assign(entries, 1);
  exponents_.assign(entries * context_.plan.note_bytes, kNotFloat8);
  queries_at_.resize(options.audit_groups);
  drawn_.resize(options.heads_apart);
  others_.resize(options.heads_apart);
  return Status::ok();
}

Status RecallAudit::begin(int64_t layer, const LayerStep& step, int64_t queries) {
  is_looking_ = false;
  if (!is_due(layer)) return Status::ok();
  layer_ = layer;
  KVSWAP_RETURN_IF_ERROR(make_memory());
  draw(step);
  if (*std::max_element(drawn_.begin(), drawn_.end()) == 0) return Status::ok();
  KVSWAP_RETURN_IF_ERROR(sealer_.drain_layer(layer));
  KVSWAP_RETURN_IF_ERROR(context_.fetcher->submit(fetch_));
  const EngineOptions& options = context_.options;
  attended_.resize(batch_.size() * options.query_heads * queries);
  std::fill(queries_at_.begin(), queries_at_.end(),
            static_cast<int32_t>(batch_.layer(layer).positions - queries));
  is_looking_ = true;
  return Status::ok();
}

void RecallAudit::draw(const LayerStep& step) {
  fetch_.layer = layer_;
  fetch_.loads.clear();
  std::fill(pages_.begin(), pages_.end(), nullptr);
  std::fill(masks_.begin(), masks_.end(), 0);
  for (int64_t head = 0; head < context_.options.heads_apart; ++head) {
    draw_of_part(head, step.chosen()[first_part_ + head]);
  }
}

/// Tokens of a group that could be selected, and are not attended.
uint64_t RecallAudit::left_out(int64_t sequence, int64_t group,
                               const std::vector<int32_t>& chosen) const {
  uint64_t left = batch_.selectable(layer_, sequence, group);
  const ClusterStore* clusters = context_.clusters_of(layer_);
  const bool chose_groups = !chosen.empty() && !is_page_id(chosen.front());
  if (clusters == nullptr || chose_groups) return left;
  const ClusterPages& pages = clusters->of(layer_, sequence).pages;
  const int64_t first = group * pages.page_tokens();
  for (int64_t i = 0; i < pages.page_tokens(); ++i) {
    const int64_t slot = pages.place(first + i) / pages.page_tokens();
    const bool is_chosen = pages.place(first + i) >= 0 &&
                           std::binary_search(chosen.begin(), chosen.end(), page_id(slot));
    if (is_chosen || pages.waiting_at(first + i) >= 0) left &= ~(uint64_t{1} << i);
  }
  return left;
}

/// `audit_groups` of the groups that have something left out, and are neither selected nor pinned,
/// each set of them equally likely (a reservoir).
void RecallAudit::draw_of_part(int64_t head, const std::vector<int32_t>& chosen) {
  const EngineOptions& options = context_.options;
  const int64_t sequence = first_part_ + head;
  const auto wanted = static_cast<size_t>(options.audit_groups);
  int64_t& others = others_[head];
  others = 0;
  sample_.clear();
  auto next = chosen.begin();
  for (int32_t group = 0; group < batch_.layer(layer_).sealed_groups; ++group) {
    while (next != chosen.end() && *next < group) ++next;
    if (next != chosen.end() && *next == group) continue;
    if (batch_.is_pinned(layer_, sequence, group) || left_out(sequence, group, chosen) == 0)
      continue;
    ++others;
    if (sample_.size() < wanted) {
      sample_.push_back(group);
    } else if (const auto place = random_() % static_cast<uint64_t>(others); place < wanted) {
      sample_[place] = group;
    }
  }
  std::sort(sample_.begin(), sample_.end());  // neighbours are read together
  drawn_[head] = static_cast<int64_t>(sample_.size());
  for (size_t i = 0; i < sample_.size(); ++i) {
    const int64_t entry = static_cast<int64_t>(i) * options.heads_apart + head;
    std::byte* target = memory_.get() + entry * context_.record_bytes();
    fetch_.loads.push_back({.sequence = sequence, .group = sample_[i], .target = target});
    pages_[entry] = target;
    context_.store->copy_note(layer_, sequence, sample_[i],
                              exponents_.data() + entry * context_.plan.note_bytes);
    masks_[entry] = left_out(sequence, sample_[i], chosen);
    positions_[entry] = static_cast<int32_t>(sample_[i] * options.group_tokens);
  }
}

Status RecallAudit::finish(const PagedAttentionArgs& attended) {
  if (!std::exchange(is_looking_, false)) return Status::ok();
  Status arrived = context_.fetcher->finish(fetch_);
  if (arrived.is_pending()) context_.fetcher->abandon(fetch_, std::exchange(memory_, nullptr));
  KVSWAP_RETURN_IF_ERROR(arrived);
  weigh(attended);
  return Status::ok();
}

/// Each group is attended alone, by all queries and heads of the sequence.
void RecallAudit::weigh(const PagedAttentionArgs& attended) {
  const EngineOptions& options = context_.options;
  const int64_t sequence = first_part_ / options.heads_apart;
  const int64_t rows = attended.heads * attended.queries;
  log_sums_.resize(options.audit_groups * rows);
  output_.resize(options.audit_groups * rows * options.head_dim * dtype_bytes(options.dtype));
  PagedAttentionArgs args = attended;
  args.query = static_cast<const std::byte*>(attended.query) +
               sequence * attended.query_batch_stride * dtype_bytes(options.dtype);
  args.query_batch_stride = 0;  // the same query meets every group
  args.output = output_.data();
  args.log_sum_exp = log_sums_.data();
  args.pages = pages_.data();
  args.masks = masks_.data();
  args.positions = positions_.data();
  args.page_counts = counts_.data();
  args.query_positions = queries_at_.data();
  args.exponents = exponents_.empty() ? nullptr : exponents_.data();
  args.pages_max = 1;
  args.batch = options.audit_groups;
  args.sinks = nullptr;
  context_.space->compute().attend(layer_, args);
  const float* own = attended_.data() + sequence * rows;
  double sum = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = row / attended.queries;
    const int64_t part = head / (attended.heads / options.heads_apart);
    sum += share_of(log_sums_.data() + row, rows, own[row], part);
  }
  const double share = sum / static_cast<double>(rows);
  layers_[layer_].add(share);
  context_.group_counts.observe(layer_, share);
}

/// Of one head and query: `log_sums` of each group, `stride` apart.
double RecallAudit::share_of(const float* log_sums, int64_t stride, float attended,
                             int64_t sequence) const {
  const int64_t drawn = drawn_[sequence];
  const int64_t others = others_[sequence];
  if (drawn == 0) return 0;
  double total = 0;
  const auto ratio = [&](int64_t i) {
    return std::exp(static_cast<double>(log_sums[i * stride]) - attended);
  };
  for (int64_t i = 0; i < drawn; ++i) total += ratio(i);
  const auto share = [&](double sum, int64_t count) {
    const double missed = sum * static_cast<double>(others) / static_cast<double>(count);
    return missed / (1 + missed);
  };
  if (drawn == others || drawn < 2) return share(total, drawn);
  double without_one = 0;
  for (int64_t i = 0; i < drawn; ++i) without_one += share(total - ratio(i), drawn - 1);
  const auto count = static_cast<double>(drawn);
  return count * share(total, drawn) - (count - 1) / count * without_one;
}

}  // namespace kvswap
