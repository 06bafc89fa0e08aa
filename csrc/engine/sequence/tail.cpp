#include "engine/sequence/tail.h"

#include <algorithm>
#include <vector>

namespace kvswap {

void fill_tail(EngineContext& context, const Batch& batch, int64_t layer,
               const KeyValueView& tokens, const TailPiece& piece) {
  if (piece.count == 0) return;
  const int64_t group_tokens = context.options.group_tokens;
  std::vector<void*> records;
  std::vector<int32_t> sequences;
  std::vector<int64_t> first_tokens;
  std::vector<int32_t> slots;
  std::vector<int32_t> lengths;
  for (int64_t sequence = 0; sequence < batch.size(); ++sequence) {
    for (int64_t token = 0; token < piece.count;) {
      const int64_t position = piece.first_position + token;
      const int64_t length = std::min(group_tokens - position % group_tokens, piece.count - token);
      records.push_back(batch.pages(sequence).tail_page(layer, position / group_tokens));
      sequences.push_back(static_cast<int32_t>(sequence));
      first_tokens.push_back(piece.first_token + token);
      slots.push_back(static_cast<int32_t>(position % group_tokens));
      lengths.push_back(static_cast<int32_t>(length));
      token += length;
    }
  }
  cuda::BatchTransferArgs transfer = transfer_of(context.plan, tokens);
  transfer.records = records.data();
  transfer.sequences = sequences.data();
  transfer.first_tokens = first_tokens.data();
  transfer.slots = slots.data();
  transfer.lengths = lengths.data();
  transfer.count = static_cast<int64_t>(records.size());
  context.space->compute().pack(transfer);
}

cuda::BatchTransferArgs transfer_of(const Plan& plan, const KeyValueView& tokens) {
  cuda::BatchTransferArgs transfer;
  transfer.shape = plan.record_shape;
  transfer.tokens = {.keys = const_cast<void*>(tokens.keys),
                     .values = const_cast<void*>(tokens.values),
                     .key_head_stride = tokens.key_head_stride,
                     .key_token_stride = tokens.key_token_stride,
                     .value_head_stride = tokens.value_head_stride,
                     .value_token_stride = tokens.value_token_stride};
  transfer.key_batch_stride = tokens.key_batch_stride;
  transfer.value_batch_stride = tokens.value_batch_stride;
  transfer.heads_apart = tokens.heads_apart;
  return transfer;
}

}  // namespace kvswap
