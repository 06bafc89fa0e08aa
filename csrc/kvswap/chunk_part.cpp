#include <algorithm>
#include <vector>

#include "engine/page_tokens.h"
#include "kernels/chunk_attention.h"
#include "kvswap/host_part.h"

namespace kvswap {
namespace {

constexpr int64_t kAloneQueries = 512;  // whose answers are in fp32 at a time

class ChunkPart final : public HostPart {
 public:
  ChunkPart(const Engine& engine, int64_t part, const PartView& view, const AttendArgs& args)
      : HostPart(engine, part, view, args) {}

  void attend_tokens(int64_t begin, int64_t end, const KeyValueView& tokens) override {
    attend({.view = {.keys = const_cast<void*>(tokens.keys),
                     .values = const_cast<void*>(tokens.values),
                     .key_head_stride = tokens.key_head_stride,
                     .key_token_stride = tokens.key_token_stride,
                     .value_head_stride = tokens.value_head_stride,
                     .value_token_stride = tokens.value_token_stride},
            .tokens = end - begin,
            .position = begin});
  }

  bool unpacks() const override { return options().has_float8_records(); }

  Status visit_sealed(const PastStream::Block& block) override {
    const int64_t group_tokens = options().group_tokens;
    std::vector<const void*> records(block.listed->pages.begin(), block.listed->pages.end());
    if (unpacks()) decode(block, records);
    attend({.records = records.data(),
            .tokens = block.groups * group_tokens,
            .position = block.first_group * group_tokens});
    return Status::ok();
  }

  Status visit_left(const LeftTokens& left) override {
    const int64_t group_tokens = options().group_tokens;
    std::vector<const void*> records;
    for (int64_t token = 0; token < left.count; token += group_tokens) {
      records.push_back(left.pages.data() + token / group_tokens * options().group_bytes());
    }
    // They all count, and are before every query of the chunk, wherever they stood.
    run({.records = records.data(),
         .tokens = left.count,
         .position = view().position - left.count});
    return Status::ok();
  }

 private:
  /// Pages of e4m3 become those of the cache's dtype.
  void decode(const PastStream::Block& block, std::vector<const void*>& records) {
    const int64_t bytes = options().group_bytes();
    if (block.room == nullptr) decoded_.resize(block.groups * bytes);
    std::byte* room = block.room == nullptr ? decoded_.data() : block.room;
    run_parallel(execution(), block.groups, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int8_t* exponents = block.listed->exponents.data() + i * options().note_bytes();
        records[i] = tokens_of_page(options(), block.listed->pages[i], exponents, room + i * bytes);
      }
    });
  }

  /// Tokens by their positions; padding does not count.
  void attend(ChunkAttentionArgs args) {
    std::vector<uint8_t> valid;
    if (args.position < validity().all_valid_from()) {
      valid.resize(args.tokens);
      for (int64_t t = 0; t < args.tokens; ++t) valid[t] = validity().is_valid(args.position + t);
      args.valid = valid.data();
    }
    run(args);
  }

  void run(ChunkAttentionArgs args) {
    args.query = query().data;
    args.query_head_stride = query().head_stride;
    args.query_token_stride = query().query_stride;
    args.output = output();
    args.log_sum_exp = log_sum_exp();
    args.query_position = view().position;
    args.heads = query().heads;
    args.queries = query().queries;
    args.scale = scale();
    args.softcap = softcap();
    args.shape = options().record_shape();
    chunk_attention(args, execution());
  }

  std::vector<std::byte> decoded_;  // a block, where it has no room for that
};

}  // namespace

bool takes_chunk_parts(const EngineOptions& options) {
  return options.dtype == DType::kBFloat16 && has_chunk_attention();
}

std::unique_ptr<ExactPart> chunk_part(const Engine& engine, int64_t part, const PartView& view,
                                      const AttendArgs& args) {
  auto attending = std::make_unique<ChunkPart>(engine, part, view, args);
  attending->attend_tokens(view.position, view.position + view.query.queries, view.own);
  return attending;
}

void attend_chunk_alone(const Engine& engine, int64_t part, const PartView& view,
                        const AttendArgs& args) {
  const EngineOptions& options = engine.parts().options;
  for (int64_t first = 0; first < view.query.queries; first += kAloneQueries) {
    PartView some = view;
    some.query.data = view.query.at(0, 0, first);
    some.query.queries = std::min(kAloneQueries, view.query.queries - first);
    some.position = view.position + first;
    some.output = view.output + first * view.output_stride * dtype_bytes(options.dtype);
    ChunkPart attending(engine, part, some, args);
    attending.attend_tokens(view.position, some.position + some.query.queries, view.own);
    attending.write();
  }
}

}  // namespace kvswap
