#include "engine/snapshot/saved_retention.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "engine/snapshot/tensor_names.h"
#include "methods/retention/retained_state.h"

namespace kvswap {
namespace {

RetainedLimits limits_of(const EngineContext& context, const SavedCounts& counts) {
  const EngineOptions& options = context.options;
  const RetentionPlan& retention = context.retention;
  return {.positions = counts.positions,
          .sealed = counts.groups * options.group_tokens,
          .group_tokens = options.group_tokens,
          .in_dtype_max = retention.in_dtype_max,
          .tokens_max = retention.tokens_max,
          .pages = retention.layer_pages,
          .float8_per_page = retention.float8_per_token,
          .note_bytes = retention.has_float8 ? context.plan.page_note_bytes : 0,
          .dtype = options.dtype,
          .heads = options.query_heads,
          .head_dim = options.head_dim,
          .window = options.keep_window,
          .step = options.select_queries_max};
}

}  // namespace

void list_retained(EngineContext& context, Batch& batch, int64_t layer,
                   std::vector<SavedTensor>& tensors) {
  if (context.retention.pages == 0 || !context.plan.keeps_tokens(layer)) return;
  const EngineOptions& options = context.options;
  std::vector<uint32_t> sizes;
  std::vector<std::byte> states;
  std::vector<const std::byte*> pages;
  std::vector<const std::byte*> float8_pages;
  for (int64_t sequence = 0; sequence < batch.size(); ++sequence) {
    SequencePages& of_sequence = batch.pages(sequence);
    const RetainedTokens& retained = of_sequence.retained(layer);
    const std::vector<std::byte> state = retained_to_bytes(retained);
    const RetainedPageCounts count = page_counts(retained, options.group_tokens);
    states.insert(states.end(), state.begin(), state.end());
    for (const int64_t size : {std::ssize(state), count.in_dtype, count.float8}) {
      sizes.push_back(static_cast<uint32_t>(size));
    }
    for (int64_t page = 0; page < count.in_dtype; ++page) {
      pages.push_back(of_sequence.retained_page(layer, page));
    }
    for (int64_t page = 0; page < count.float8; ++page) {
      float8_pages.push_back(of_sequence.retained_float8_page(layer, page));
    }
  }
  const auto list = [&](const char* what, const char* dtype, std::vector<int64_t> shape,
                        int64_t row_bytes, auto read) {
    if (shape.front() == 0) return;
    tensors.push_back({saved_name(layer, what), dtype, std::move(shape), row_bytes, read});
  };
  const auto bytes_of = [](auto held) {
    return [held](int64_t first, int64_t bytes, std::byte* target) {
      std::memcpy(target, held->data() + first, bytes);
      return Status::ok();
    };
  };
  const auto pages_of = [&context](std::vector<const std::byte*> held, int64_t bytes) {
    return
        [&context, held = std::move(held), bytes](int64_t first, int64_t rows, std::byte* target) {
          for (int64_t i = 0; i < rows; ++i) {
            KVSWAP_RETURN_IF_ERROR(
                context.space->compute().download(target + i * bytes, held[first + i], bytes));
          }
          return Status::ok();
        };
  };
  const auto raw_sizes = std::make_shared<const std::vector<uint32_t>>(std::move(sizes));
  constexpr int64_t kRowBytes = 3 * sizeof(uint32_t);
  list("kept_sizes", "U32", {batch.size(), 3}, kRowBytes,
       [raw_sizes](int64_t first, int64_t rows, std::byte* target) {
         std::memcpy(target, raw_sizes->data() + 3 * first, rows * kRowBytes);
         return Status::ok();
       });
  const auto raw_states = std::make_shared<const std::vector<std::byte>>(std::move(states));
  list("kept", "U8", {std::ssize(*raw_states)}, 1, bytes_of(raw_states));
  const int64_t page_bytes = context.plan.group_bytes;
  const int64_t count = std::ssize(pages), float8_count = std::ssize(float8_pages);
  list("kept_pages", saved_dtype(options.dtype), saved_page_sizes(context.plan.record_shape, count),
       page_bytes, pages_of(std::move(pages), page_bytes));
  const int64_t float8_bytes = page_bytes / context.retention.float8_per_token;
  list("kept_float8_pages", "U8", {float8_count, float8_bytes}, float8_bytes,
       pages_of(std::move(float8_pages), float8_bytes));
}

Status load_retained(EngineContext& context, Batch& batch, const RetainedPlace& place,
                     const SavedTensors& saved) {
  const auto& [layer, counts] = place;
  if (context.retention.pages == 0 || !context.plan.keeps_tokens(layer)) return Status::ok();
  const EngineOptions& options = context.options;
  const int64_t sizes_shape[] = {counts.sequences, 3};
  auto found = saved.get(saved_name(layer, "kept_sizes"), "U32", sizes_shape);
  if (!found.is_ok()) return found.status();
  const std::vector<uint32_t> sizes = copied<uint32_t>(found.value());
  int64_t totals[3] = {};
  for (size_t i = 0; i < sizes.size(); ++i) totals[i % 3] += sizes[i];
  const std::string name = saved_name(layer, "kept");
  const int64_t state_shape[] = {totals[0]};
  auto states = saved.get(name, "U8", state_shape);
  if (!states.is_ok()) return states.status();
  const int64_t bytes = context.plan.group_bytes;
  const int64_t float8_bytes = bytes / context.retention.float8_per_token;
  SavedBytes pages[2];
  const auto shape = saved_page_sizes(context.plan.record_shape, totals[1]);
  const int64_t float8_shape[] = {totals[2], float8_bytes};
  if (totals[1] > 0) {
    auto read = saved.get(saved_name(layer, "kept_pages"), saved_dtype(options.dtype), shape);
    if (!read.is_ok()) return read.status();
    pages[0] = read.value();
  }
  if (totals[2] > 0) {
    auto read = saved.get(saved_name(layer, "kept_float8_pages"), "U8", float8_shape);
    if (!read.is_ok()) return read.status();
    pages[1] = read.value();
  }
  size_t state_at = 0, page_at = 0, float8_at = 0;
  for (int64_t sequence = 0; sequence < counts.sequences; ++sequence) {
    SequencePages& of_sequence = batch.pages(sequence);
    RetainedTokens& retained = of_sequence.retained(layer);
    const size_t length = sizes[3 * sequence];
    const auto wrong = retained_from_bytes(states.value().subspan(state_at, length),
                                           limits_of(context, counts), retained);
    state_at += length;
    if (wrong) return saved.refuse(name, *wrong);
    const RetainedPageCounts count = page_counts(retained, options.group_tokens);
    if (count.in_dtype != sizes[3 * sequence + 1] || count.float8 != sizes[3 * sequence + 2]) {
      return saved.refuse(saved_name(layer, "kept_sizes"), "count the pages of what is kept");
    }
    if (context.retention.has_layer_budgets) {
      int64_t held = count.in_dtype;
      for (int64_t other = 0; other < layer; ++other) {
        held += page_counts(of_sequence.retained(other), options.group_tokens).in_dtype;
      }
      if (held > options.layers * context.retention.pages) {
        return saved.refuse(name, "fit the pages that layers share");
      }
      of_sequence.hold_retained(layer, std::ssize(retained.positions()));
    }
    Compute& compute = context.space->compute();
    for (int64_t page = 0; page < count.in_dtype; ++page, page_at += bytes) {
      KVSWAP_RETURN_IF_ERROR(
          compute.upload(of_sequence.retained_page(layer, page), pages[0].data() + page_at, bytes));
    }
    for (int64_t page = 0; page < count.float8; ++page, float8_at += float8_bytes) {
      KVSWAP_RETURN_IF_ERROR(compute.upload(of_sequence.retained_float8_page(layer, page),
                                            pages[1].data() + float8_at, float8_bytes));
    }
  }
  return Status::ok();
}

}  // namespace kvswap
