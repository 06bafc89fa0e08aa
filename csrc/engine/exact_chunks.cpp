#include "engine/exact_chunks.h"

#include <algorithm>
#include <vector>

namespace kvswap {
namespace {

constexpr int64_t kBlockTokensEnough = 512;  // for which no reuse buffer is given up
constexpr int64_t kBlockTokensMax = 2048;    // more gains nothing

}  // namespace

void ExactChunks::reserve(Arena& arena, const Plan& plan) {
  // Two blocks of the past are unpacked to them.
  arena.take(Use::kStaging, 2 * plan.past_block_groups * plan.token_page_bytes);
}

Status ExactChunks::prepare(int64_t layer, int64_t sequences, int64_t tokens) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter(layer));
  KVSWAP_RETURN_IF_ERROR(begin(layer));
  return appender_.prepare(layer, sequences * parts_.options.heads_apart, tokens);
}

Status ExactChunks::begin(int64_t layer) {
  if (!parts_.plan.drops || batch_.layer(layer).positions == 0 || !takes(layer)) {
    return Status::ok();
  }
  KVSWAP_RETURN_IF_ERROR(steps_.drop(layer));
  return keeping_.turn_before_chunk(layer);
}

void ExactChunks::end(int64_t layer, int64_t tokens) {
  keeping_.note_chunk(layer, tokens);
  if (!parts_.plan.drops || batch_.layer(layer).positions != tokens) return;
  if (keeping_.turn(layer, tokens).is_ok()) keeping_.dropping().drop_past(layer);
}

void ExactChunks::count(int64_t layer) {
  if (appender_.pass() != Pass::kDecode) return;
  EngineCounters& counters = parts_.counters;
  const auto groups = static_cast<uint64_t>(batch_.size() * batch_.layer(layer).sealed_groups);
  counters.groups_attended += groups;
  counters.groups_loaded += groups;
  counters.sequences += batch_.size() / parts_.options.heads_apart;
  ++counters.steps;
  steps_.of(layer).forget_choice();
}

Status ExactChunks::walk(const PastWalk& walk, PastVisitor& visitor) {
  KVSWAP_RETURN_IF_ERROR(calls_.enter(walk.layer));
  const int64_t group_tokens = parts_.options.group_tokens;
  const int64_t gone = parts_.store->tables().first_group(walk.layer, walk.part);
  if (gone > 0) {
    KVSWAP_RETURN_IF_ERROR(visitor.visit_left(keeping_.dropping().left(walk.layer, walk.part)));
  }
  const int64_t first_group =
      std::max(gone, std::min(walk.past, batch_.validity(walk.part).first_valid()) / group_tokens);
  // append() may have sealed a group that the chunk's own first tokens fill up.
  const int64_t end_group =
      std::min(walk.past / group_tokens, batch_.layer(walk.layer).sealed_groups);
  KVSWAP_RETURN_IF_ERROR(
      visit_sealed({walk.layer, walk.part, first_group, end_group - first_group}, visitor));
  // Padding may reach past all that is sealed.
  const int64_t begin = std::max(first_group, end_group) * group_tokens;
  return visit_newest({walk.layer, walk.part, begin, walk.past}, visitor);
}

Status ExactChunks::visit_sealed(const PastReader::Groups& groups, PastVisitor& visitor) {
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

Status ExactChunks::visit_newest(const PastReader::Positions& positions, PastVisitor& visitor) {
  if (positions.begin >= positions.end) return Status::ok();
  const EngineOptions& options = parts_.options;
  const int64_t bytes = options.kv_heads * (positions.end - positions.begin) * options.head_dim *
                        dtype_bytes(options.dtype);
  std::vector<std::byte> keys(bytes);
  std::vector<std::byte> values(bytes);
  KVSWAP_RETURN_IF_ERROR(past_.read(positions, keys.data(), values.data()));
  return visitor.visit_newest(positions.begin, positions.end, keys.data(), values.data());
}

Result<std::unique_ptr<PastStream>> ExactChunks::stream(const PastReader::Groups& groups,
                                                        bool with_room) {
  KVSWAP_ASSERT(groups.count >= 0 &&
                groups.first + groups.count <= batch_.layer(groups.layer).sealed_groups);
  auto found = blocks(groups, with_room);
  if (!found.is_ok()) return found.status();
  return PastStream::open(past_, std::move(found.value()), groups);
}

/// Memory to stream them through. In a small budget a long past gets the reuse buffers, and the
/// next steps of as many layers as it takes read anew: what makes a long chunk fast is large
/// blocks. A layer that never chooses gets its own pages. Otherwise PastReader::blocks().
Result<PastBlocks> ExactChunks::blocks(const PastReader::Groups& groups, bool with_room) {
  const EngineOptions& options = parts_.options;
  const int64_t record_bytes = parts_.record_bytes();
  SequencePages& pages = batch_.pages(groups.sequence);
  const int64_t own = parts_.plan.past_block_groups;
  // Two blocks, and room for one that is unpacked, perhaps to a wider dtype.
  const int64_t unpacked = (parts_.plan.group_bytes + record_bytes - 1) / record_bytes;
  const int64_t pages_each = 2 + (with_room ? unpacked : 0);
  const bool is_own = parts_.plan.is_exact(groups.layer);
  const int64_t lendable = is_own ? options.pages_max : pages.reuse_pages();
  const int64_t lent =
      std::min({groups.count, lendable / pages_each, kBlockTokensMax / options.group_tokens});
  const int64_t first_layer = is_own ? groups.layer : 0;
  std::byte* base = parts_.space->landing().landing_in(pages.first_reuse_page(first_layer));
  if (base == nullptr || lent <= own || own * options.group_tokens >= kBlockTokensEnough) {
    return past_.blocks();
  }
  steps_.settle();
  for (int64_t lender = 0; lender * options.pages_max < pages_each * lent; ++lender) {
    KVSWAP_RETURN_IF_ERROR(steps_.drop_in_pages_of(first_layer + lender));
    pages.map(first_layer + lender).clear();
  }
  const int64_t bytes = lent * record_bytes;
  return PastBlocks{.memory = pages.memory(),
                    .slots = {base, base + bytes},
                    .room = with_room ? base + 2 * bytes : nullptr,
                    .groups = lent};
}

}  // namespace kvswap
