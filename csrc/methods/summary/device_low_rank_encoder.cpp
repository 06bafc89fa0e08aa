#include <algorithm>
#include <vector>

#include "methods/summary/device_encoder.h"
#include "methods/summary/low_rank_encoder.h"

namespace kvswap {
namespace {

class DeviceLowRankEncoder final : public DeviceEncoder {
 public:
  static std::unique_ptr<DeviceEncoder> make(Device& device, const MethodOptions& options,
                                             const SummaryEncoder& rows) {
    return std::make_unique<DeviceLowRankEncoder>(device, options,
                                                  static_cast<const LowRankEncoder&>(rows));
  }
  static int64_t table_bytes(const RowLayout& layout, int64_t sequences, int64_t groups) {
    return bytes_of(sequences * layout.pieces(groups));
  }

  DeviceLowRankEncoder(Device& device, const MethodOptions& options, const LowRankEncoder& rows)
      : device_(device), options_(options), rows_(rows) {}

  void write(int64_t layer, std::span<const SummarySlice> pieces, UploadRing& tables) override {
    // Of heads apart each has its own projection: a launch each.
    for (int64_t head = 0; head < options_.heads_apart; ++head) {
      project(layer, head, pieces, tables);
    }
  }
  void ask(const ChooseArgs& args, int64_t batch, float* asked) override {
    const bool is_sum = options_.score == Score::kSum;
    device_.launch(cuda::BatchProjectQueryArgs{
        .query = args.query.data,
        .batch_stride = args.query.batch_stride,
        .head_stride = args.query.head_stride,
        .query_stride = args.query.query_stride,
        .projection = rows_.query_projection(args.layer, 0),
        .projected = asked,
        .projects = is_sum ? cuda::QueryHeads::kSummed : cuda::QueryHeads::kEach,
        .factor = args.scale,
        .batch = batch,
        .queries = args.query.queries,
        .heads = args.query.heads,
        .kv_heads = options_.kv_heads,
        .head_dim = options_.head_dim,
        .rank = rows_.shape(args.layer).width,
        .dtype = args.query.dtype,
        .heads_apart = args.query.heads_apart});
  }

 private:
  static int64_t bytes_of(int64_t pieces) {
    return UploadRing::padded(pieces * int64_t{sizeof(cuda::ProjectPiece)});
  }

  /// The pieces of one head.
  void project(int64_t layer, int64_t head, std::span<const SummarySlice> pieces,
               UploadRing& tables) {
    cuda::BatchProjectKeysArgs args;
    std::vector<cuda::ProjectPiece> table;
    for (const SummarySlice& piece : pieces) {
      if (piece.sequence % options_.heads_apart != head) continue;
      table.push_back(
          {piece.keys.data, piece.rows, piece.row_scale, piece.first_row, piece.tokens});
      args.tokens_max = std::max(args.tokens_max, piece.tokens);
    }
    if (table.empty()) return;
    const KeyView& keys = pieces.front().keys;
    args.count = static_cast<int64_t>(table.size());
    args.head_stride = keys.head_stride;
    args.token_stride = keys.token_stride;
    args.projection = rows_.key_projection(layer, head);
    args.kv_heads = options_.kv_heads;
    args.head_dim = options_.head_dim;
    args.rank = rows_.shape(layer).width;
    args.key_dtype = keys.dtype;
    args.summary_dtype = options_.summary_dtype;
    auto sent = tables.open(bytes_of(args.count));
    args.pieces = sent.add(table);
    sent.send();
    device_.launch(args);
  }

  Device& device_;
  const MethodOptions options_;
  const LowRankEncoder& rows_;
};

}  // namespace

const DeviceEncoderKind low_rank_on_device = {.make = DeviceLowRankEncoder::make,
                                              .table_bytes = DeviceLowRankEncoder::table_bytes};

}  // namespace kvswap
