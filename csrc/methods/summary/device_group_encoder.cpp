#include <algorithm>
#include <vector>

#include "methods/summary/device_encoder.h"
#include "methods/summary/group_encoder.h"

namespace kvswap {
namespace {

class DeviceGroupEncoder final : public DeviceEncoder {
 public:
  template <GroupRow row>
  static std::unique_ptr<DeviceEncoder> make(Device& device, const MethodOptions& options,
                                             const SummaryEncoder&) {
    return std::make_unique<DeviceGroupEncoder>(device, options, row);
  }
  static int64_t table_bytes(const RowLayout& layout, int64_t sequences, int64_t groups) {
    return bytes_of(sequences * layout.pieces(groups), sequences * groups);
  }

  DeviceGroupEncoder(Device& device, const MethodOptions& options, GroupRow row)
      : device_(device), options_(options), row_(row) {}

  void write(int64_t, std::span<const SummarySlice> pieces, UploadRing& tables) override {
    const int64_t group_tokens = options_.group_tokens;
    std::vector<uint64_t> masks;
    std::vector<int64_t> first_masks;  // of each piece; -1: all of its tokens count
    for (const SummarySlice& piece : pieces) {
      const std::vector<uint64_t> own = masks_of(piece, group_tokens);
      first_masks.push_back(own.empty() ? -1 : static_cast<int64_t>(masks.size()));
      masks.insert(masks.end(), own.begin(), own.end());
    }
    cuda::BatchSummarizeArgs args;
    std::vector<cuda::GroupPiece> table;
    auto sent = tables.open(
        bytes_of(static_cast<int64_t>(pieces.size()), static_cast<int64_t>(masks.size())));
    const uint64_t* valid = sent.add(masks);
    for (size_t i = 0; i < pieces.size(); ++i) {
      const int64_t groups = pieces[i].tokens / group_tokens;
      table.push_back({.keys = pieces[i].keys.data,
                       .valid = first_masks[i] < 0 ? nullptr : valid + first_masks[i],
                       .summary = pieces[i].rows,
                       .row_scale = pieces[i].row_scale,
                       .first_row = pieces[i].first_row,
                       .groups = groups});
      args.groups_max = std::max(args.groups_max, groups);
    }
    const KeyView& keys = pieces.front().keys;
    args.pieces = sent.add(table);
    args.count = static_cast<int64_t>(pieces.size());
    args.head_stride = keys.head_stride;
    args.token_stride = keys.token_stride;
    args.group_tokens = group_tokens;
    args.kv_heads = options_.kv_heads;
    args.head_dim = options_.head_dim;
    args.row = row_;
    args.key_dtype = keys.dtype;
    args.summary_dtype = options_.summary_dtype;
    sent.send();
    device_.launch(args);
  }

  void ask(const ChooseArgs& args, int64_t batch, float* asked) override {
    device_.launch(cuda::BatchAskArgs{.query = args.query.data,
                                      .batch_stride = args.query.batch_stride,
                                      .head_stride = args.query.head_stride,
                                      .query_stride = args.query.query_stride,
                                      .asked = asked,
                                      .batch = batch,
                                      .queries = args.query.queries,
                                      .heads = args.query.heads,
                                      .kv_heads = options_.kv_heads,
                                      .head_dim = options_.head_dim,
                                      .row = row_,
                                      .weight = static_cast<float>(options_.bound_weight),
                                      .dtype = args.query.dtype,
                                      .heads_apart = args.query.heads_apart});
  }

 private:
  static int64_t bytes_of(int64_t pieces, int64_t masks) {
    return UploadRing::padded(pieces * int64_t{sizeof(cuda::GroupPiece)}) +
           UploadRing::padded(masks * int64_t{sizeof(uint64_t)});
  }

  Device& device_;
  const MethodOptions options_;
  const GroupRow row_;
};

}  // namespace

const DeviceEncoderKind box_on_device = {.make = DeviceGroupEncoder::make<GroupRow::kBox>,
                                         .table_bytes = DeviceGroupEncoder::table_bytes};
const DeviceEncoderKind mean_on_device = {.make = DeviceGroupEncoder::make<GroupRow::kMean>,
                                          .table_bytes = DeviceGroupEncoder::table_bytes};

}  // namespace kvswap
