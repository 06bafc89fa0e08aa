#include "engine/prefill/chunked_prefill.h"

#include <algorithm>
#include <vector>

namespace kvswap {
namespace {

constexpr int64_t kBlockTokensEnough = 512;  // for which no reuse buffer is given up

}  // namespace

void ChunkedPrefill::reserve(Arena& arena, const Plan& plan) {
  // Two blocks of the prefix are unpacked to them.
  arena.take(Use::kStaging, 2 * plan.past_block_groups * plan.token_page_bytes);
}

Status ChunkedPrefill::prepare(int64_t layer, int64_t sequences, int64_t tokens) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter(layer));
  KVSWAP_RETURN_IF_ERROR(begin(layer));
  return appender_.prepare(layer, sequences * context_.options.heads_apart, tokens);
}

Status ChunkedPrefill::begin(int64_t layer) {
  if (!context_.plan.drops || batch_.layer(layer).positions == 0 || !takes(layer)) {
    return Status::ok();
  }
  KVSWAP_RETURN_IF_ERROR(steps_.drop(layer));
  return retention_.refresh_before_chunk(layer);
}

void ChunkedPrefill::end(int64_t layer, int64_t tokens) {
  retention_.note_chunk(layer, tokens);
  if (!context_.plan.drops || batch_.layer(layer).positions != tokens) return;
  if (retention_.refresh(layer, tokens).is_ok()) retention_.eviction().discard_prefix(layer);
}

void ChunkedPrefill::count(int64_t layer) {
  steps_.of(layer).set_last({});
  if (appender_.pass() != Pass::kDecode) return;
  EngineCounters& counters = context_.counters;
  const auto groups = static_cast<uint64_t>(batch_.size() * batch_.layer(layer).sealed_groups);
  counters.groups_attended += groups;
  counters.groups_loaded += groups;
  counters.sequences += batch_.size() / context_.options.heads_apart;
  ++counters.steps;
  steps_.of(layer).forget_selection();
}

Status ChunkedPrefill::walk(const PrefixWalk& walk, PrefixVisitor& visitor) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter(walk.layer));
  const int64_t group_tokens = context_.options.group_tokens;
  const int64_t gone = context_.store->tables().first_group(walk.layer, walk.sequence);
  if (gone > 0) {
    KVSWAP_RETURN_IF_ERROR(
        visitor.visit_left(retention_.eviction().left(walk.layer, walk.sequence)));
  }
  const int64_t first_group = std::max(
      gone, std::min(walk.past, batch_.validity(walk.sequence).first_valid()) / group_tokens);
  // append() may have sealed a group that the chunk's own first tokens fill up.
  const int64_t end_group =
      std::min(walk.past / group_tokens, batch_.layer(walk.layer).sealed_groups);
  KVSWAP_RETURN_IF_ERROR(
      visit_sealed({walk.layer, walk.sequence, first_group, end_group - first_group}, visitor));
  // Padding may reach past all that is sealed.
  const int64_t begin = std::max(first_group, end_group) * group_tokens;
  return visit_newest({walk.layer, walk.sequence, begin, walk.past}, visitor);
}

Status ChunkedPrefill::visit_sealed(const PrefixReader::Groups& groups, PrefixVisitor& visitor) {
  if (groups.count <= 0) return Status::ok();
  auto opened = stream(groups, visitor.unpacks());
  if (!opened.is_ok()) return opened.status();
  while (true) {
    auto block = opened.value()->next();
    if (!block.is_ok()) return block.status();
    if (block.value().groups == 0) return Status::ok();
    KVSWAP_RETURN_IF_ERROR(visitor.visit_sealed(block.value()));
  }
}

Status ChunkedPrefill::visit_newest(const PrefixReader::Positions& positions,
                                    PrefixVisitor& visitor) {
  if (positions.begin >= positions.end) return Status::ok();
  const RecordShape& shape = context_.plan.record_shape;
  const int64_t rows = shape.kv_heads * (positions.end - positions.begin);
  std::vector<std::byte> keys(rows * shape.head_dim * shape.element_bytes);
  std::vector<std::byte> values(rows * shape.value_width() * shape.element_bytes);
  KVSWAP_RETURN_IF_ERROR(past_.read(positions, keys.data(), values.data()));
  return visitor.visit_newest(positions.begin, positions.end, keys.data(), values.data());
}

Result<std::unique_ptr<PrefixStream>> ChunkedPrefill::stream(const PrefixReader::Groups& groups,
                                                             bool with_room) {
  KVSWAP_ASSERT(groups.count >= 0 &&
                groups.first + groups.count <= batch_.layer(groups.layer).sealed_groups);
  auto found = blocks(groups, with_room);
  if (!found.is_ok()) return found.status();
  return PrefixStream::open(past_, std::move(found.value()), groups);
}

/// Memory to stream them through. In a small budget a long past gets the reuse buffers, and the
/// next steps of as many layers as it takes read anew: what makes a long chunk fast is large
/// blocks. A layer that never chooses gets its own pages. Otherwise PrefixReader::blocks().
Result<PrefixBlocks> ChunkedPrefill::blocks(const PrefixReader::Groups& groups, bool with_room) {
  const EngineOptions& options = context_.options;
  const int64_t record_bytes = context_.record_bytes();
  SequencePages& pages = batch_.pages(groups.sequence);
  const int64_t own = context_.plan.past_block_groups;
  // Two blocks, and room for one that is unpacked, perhaps to a wider dtype.
  const int64_t unpacked = (context_.plan.group_bytes + record_bytes - 1) / record_bytes;
  const int64_t pages_each = 2 + (with_room ? unpacked : 0);
  const bool is_own = context_.plan.is_exact(groups.layer);
  const int64_t lendable = is_own ? options.pages_max : pages.reuse_pages();
  const int64_t lent =
      std::min({groups.count, lendable / pages_each, kPastBlockTokens / options.group_tokens});
  const int64_t first_layer = is_own ? groups.layer : 0;
  std::byte* base = context_.space->landing().landing_in(pages.first_reuse_page(first_layer));
  if (base == nullptr || lent <= own || own * options.group_tokens >= kBlockTokensEnough) {
    return past_.blocks();
  }
  steps_.drain();
  for (int64_t lender = 0; lender * options.pages_max < pages_each * lent; ++lender) {
    KVSWAP_RETURN_IF_ERROR(steps_.drop_in_pages_of(first_layer + lender));
    pages.map(first_layer + lender).clear();
  }
  const int64_t bytes = lent * record_bytes;
  return PrefixBlocks{.memory = pages.memory(),
                      .slots = {base, base + bytes},
                      .room = with_room ? base + 2 * bytes : nullptr,
                      .groups = lent};
}

}  // namespace kvswap
