// What long chunks and their callers ask of the past.

#include <algorithm>

#include "engine/engine.h"

namespace kvswap {
namespace {

constexpr int64_t kBlockTokensEnough = 512;  // for which no reuse buffer is given up
constexpr int64_t kBlockTokensMax = 2048;    // more gains nothing

}  // namespace

/// Where nothing is on disk: what came before has its turn while it is all there.
Status Engine::begin_chunk(int64_t layer, int64_t tokens) {
  if (!options().drops() || columns(layer) == 0 || !attends_exactly(layer, tokens)) {
    return Status::ok();
  }
  KVSWAP_RETURN_IF_ERROR(steps_.drop(layer));
  return keeping_.turn_before_chunk(layer);
}

void Engine::end_chunk(int64_t layer, int64_t tokens) {
  if (!options().drops() || columns(layer) != tokens) return;
  if (keeping_.turn(layer, tokens).is_ok()) keeping_.dropping().drop_past(layer);
}

Status Engine::read_back(int64_t layer, int64_t sequence, int64_t begin, int64_t end, void* keys,
                         void* values) {
  const int64_t bytes =
      std::max<int64_t>(0, end - begin) * options().head_dim * dtype_bytes(options().dtype);
  for (int64_t head = 0; head < heads_apart(); ++head) {
    KVSWAP_RETURN_IF_ERROR(read_part(layer, sequence * heads_apart() + head, begin, end,
                                     static_cast<std::byte*>(keys) + head * bytes,
                                     static_cast<std::byte*>(values) + head * bytes));
  }
  return Status::ok();
}

Status Engine::read_part(int64_t layer, int64_t part, int64_t begin, int64_t end, void* keys,
                         void* values) {
  KVSWAP_RETURN_IF_ERROR(enter(layer));
  return past_->read({layer, part, begin, end}, keys, values);
}

Result<PastBlocks> Engine::past_blocks(int64_t layer, int64_t part, int64_t groups) {
  const EngineOptions& options = parts_->options;
  const int64_t record_bytes = parts_->record_bytes();
  SequencePages& pages = batch_->pages(part);
  const int64_t own = past_block_groups(options, record_bytes);
  // Two blocks, and room for one that is unpacked, perhaps to a wider dtype.
  const int64_t pages_each = 2 + (options.group_bytes() + record_bytes - 1) / record_bytes;
  const bool is_own = options.is_exact(layer);
  const int64_t lendable = is_own ? options.pages_max : pages.reuse_pages();
  const int64_t lent =
      std::min({groups, lendable / pages_each, kBlockTokensMax / options.group_tokens});
  const int64_t first_layer = is_own ? layer : 0;
  std::byte* base = parts_->space->landing().landing_in(pages.first_reuse_page(first_layer));
  if (base == nullptr || lent <= own || own * options.group_tokens >= kBlockTokensEnough) {
    return past_->blocks();
  }
  steps_.settle();
  for (int64_t lender = 0; lender * options.pages_max < pages_each * lent; ++lender) {
    KVSWAP_RETURN_IF_ERROR(steps_.drop(first_layer + lender));
    pages.map(first_layer + lender).clear();
  }
  const int64_t bytes = lent * record_bytes;
  return PastBlocks{.memory = pages.memory(),
                    .slots = {base, base + bytes},
                    .room = base + 2 * bytes,
                    .groups = lent};
}

}  // namespace kvswap
