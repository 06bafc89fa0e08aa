#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "caller_memory.h"
#include "engine/engine.h"
#include "engine/memory/memory_estimate.h"
#include "plain_memory.h"
#include "small_options.h"

namespace kvswap {

/// An engine, and what it was given, judged after each call: nothing is lost, groups are sealed in
/// time, choices are the best ones, and attention is that over what was chosen.
class EngineRun {
 public:
  /// caller: where the engine's tensors are; outlives this.
  EngineRun(const EngineOptions& options, uint64_t seed, ParallelFor parallel = nullptr,
            CallerMemory& caller = CallerMemory::of_host())
      : options_(options), caller_(caller), memory_(options), random_(seed) {
    auto engine = Engine::create(options, std::move(parallel));
    EXPECT_TRUE(engine.is_ok()) << engine.status().message();
    if (engine.is_ok()) engine_ = std::move(engine.value());
  }

  Engine& engine() { return *engine_; }
  /// Goes on with another engine, which holds what this one's does.
  std::unique_ptr<Engine> go_on_with(std::unique_ptr<Engine> other) {
    return std::exchange(engine_, std::move(other));
  }
  PlainMemory& memory() { return memory_; }
  const std::vector<std::byte>& outputs() const { return outputs_; }
  int64_t draw(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }

  std::vector<float> numbers(int64_t count, int64_t largest, float unit = 1) {
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(draw(-largest, largest)) * unit;
    return values;
  }
  Tokens draw_tokens(int64_t batch, int64_t tokens) {
    const int64_t rows = batch * options_.kv_heads * tokens;
    return {tokens, numbers(rows * options_.head_dim, 3),
            numbers(rows * memory_.value_dim(), 64, 1.0f / 16)};
  }
  std::vector<float> draw_query(int64_t batch, int64_t queries) {
    return numbers(batch * options_.query_heads * queries * options_.head_dim, 2);
  }

  /// `values` in the engine's element type; kept until the next call with the same `slot`.
  const void* raw(const std::vector<float>& values, int slot) {
    if (options_.dtype == DType::kFloat32) return values.data();
    std::vector<uint16_t>& halves = halves_[slot];
    halves.resize(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      uint32_t bits;
      std::memcpy(&bits, &values[i], sizeof(bits));
      halves[i] = static_cast<uint16_t>(bits >> 16);  // bfloat16; exact for these numbers
    }
    return halves.data();
  }
  /// The same where the engine expects it.
  const void* given(const std::vector<float>& values, int slot) {
    const auto bytes = static_cast<int64_t>(values.size()) * dtype_bytes(options_.dtype);
    return caller_.give(slot, raw(values, slot), bytes);
  }
  QueryView view(const std::vector<float>& query, int64_t queries) {
    const int64_t dim = options_.head_dim;
    return {.data = given(query, 2),
            .batch_stride = options_.query_heads * queries * dim,
            .head_stride = queries * dim,
            .query_stride = dim,
            .heads = options_.query_heads,
            .queries = queries,
            .dtype = options_.dtype};
  }
  KeyValueView view(const Tokens& tokens, int64_t batch) {
    const int64_t head = tokens.tokens * options_.head_dim;
    const int64_t value_head = tokens.tokens * memory_.value_dim();
    return {.keys = given(tokens.keys, 0),
            .values = given(tokens.values, 1),
            .key_batch_stride = options_.kv_heads * head,
            .key_head_stride = head,
            .key_token_stride = options_.head_dim,
            .value_batch_stride = options_.kv_heads * value_head,
            .value_head_stride = value_head,
            .value_token_stride = memory_.value_dim(),
            .batch = batch,
            .tokens = tokens.tokens};
  }

  Status set_projection(int64_t layer) {
    const int64_t count = options_.kv_heads * options_.head_dim * options_.ranks[layer];
    auto& target = memory_.layer(layer);
    target.key_projection = numbers(count, 2);
    target.query_projection = numbers(count, 2);
    target.asked.clear();
    return engine_->set_projection(layer, options_.ranks[layer], target.key_projection.data(),
                                   target.query_projection.data());
  }

  /// What a pass of so many tokens is: it decodes where it can, unless it is read on purpose.
  Pass pass_of(int64_t tokens) const {
    const bool decodes = tokens <= options_.select_queries_max && !reads_;
    return decodes ? Pass::kDecode : Pass::kPrefill;
  }
  Status begin(int64_t tokens) { return engine_->begin_pass(pass_of(tokens)); }
  // The engine alone, in a pass of as many tokens.
  Status give(int64_t layer, const Tokens& tokens, int64_t batch) {
    KVSWAP_RETURN_IF_ERROR(begin(tokens.tokens));
    return engine_->append(layer, view(tokens, batch));
  }
  Status ask(int64_t layer, const std::vector<float>& query, int64_t queries) {
    KVSWAP_RETURN_IF_ERROR(begin(queries));
    return engine_->look_ahead(layer, view(query, queries));
  }
  Status attend(int64_t layer, const std::vector<float>& query, int64_t queries,
                std::vector<std::byte>& output) {
    KVSWAP_RETURN_IF_ERROR(begin(queries));
    sealed_before_ = engine_->sequences().layer(layer).sealed_groups;
    const auto rows = static_cast<int64_t>(query.size()) / options_.head_dim;
    output.assign(rows * memory_.value_dim() * dtype_bytes(options_.dtype), std::byte{0xab});
    const Status attended = engine_->attend({.layer = layer,
                                             .query = view(query, queries),
                                             .output = caller_.room(output),
                                             .scale = 0.125f});
    caller_.take(output);
    return attended;
  }

  /// A prefill, however short.
  void read(int64_t batch, int64_t tokens, const std::vector<uint8_t>& valid = {}) {
    reads_ = true;
    forward(batch, tokens, valid);
    reads_ = false;
  }
  /// One forward pass of `tokens` new positions through all layers.
  void forward(int64_t batch, int64_t tokens, const std::vector<uint8_t>& valid = {}) {
    if (!valid.empty()) {
      const auto* flags = reinterpret_cast<const bool*>(valid.data());
      memory_.declare(batch, tokens, flags);
      const Status declared = engine_->declare(batch, tokens, flags);
      ASSERT_TRUE(declared.is_ok()) << declared.message();
    }
    bool has_looked = false;
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      if (!has_looked && draw(0, 3) > 0 && engine_->batch() > 0) look_ahead(layer, tokens);
      has_looked = layer + 1 < options_.layers && draw(0, 1) > 0 && engine_->batch() > 0;
      if (has_looked) look_ahead(layer + 1, tokens);
      append(layer, batch, tokens);
      if (pass_of(tokens) == Pass::kDecode && draw(0, 9) > 0) attend_and_compare(layer, tokens);
    }
    compare_state();
  }

  void append(int64_t layer, int64_t batch, int64_t tokens) {
    const Tokens drawn = draw_tokens(batch, tokens);
    memory_.append(layer, batch, drawn);
    const Status appended = give(layer, drawn, batch);
    ASSERT_TRUE(appended.is_ok()) << appended.message();
    if (pass_of(tokens) == Pass::kDecode) return;
    ASSERT_EQ(engine_->sequences().layer(layer).sealed_groups,
              options_.sealed_groups(engine_->positions(layer)));
  }

  void look_ahead(int64_t layer, int64_t queries) {
    const std::vector<float> query = draw_query(engine_->batch(), queries);
    memory_.layer(layer).asked.push_back(query);
    const Status planned = ask(layer, query, queries);
    ASSERT_TRUE(planned.is_ok()) << planned.message();
  }

  void attend_and_compare(int64_t layer, int64_t queries) {
    if (engine_->needs_projection(layer)) {
      const Status set = set_projection(layer);
      ASSERT_TRUE(set.is_ok()) << set.message();
    }
    const std::vector<float> query = draw_query(engine_->batch(), queries);
    std::vector<std::byte> output;
    const Status attended = attend(layer, query, queries, output);
    ASSERT_TRUE(attended.is_ok()) << attended.message();
    expect_attended(layer, query, queries, output);
    outputs_.insert(outputs_.end(), output.begin(), output.end());
  }

  /// What attend() has answered just now: over the groups that are best by a look-ahead's query or
  /// by its own. What has left the tail is sealed afterwards.
  void expect_attended(int64_t layer, const std::vector<float>& query, int64_t queries,
                       const std::vector<std::byte>& output) {
    const auto chosen = engine_->last_selection(layer);
    std::vector<std::vector<float>> asked = std::exchange(memory_.layer(layer).asked, {});
    asked.push_back(query);
    // Keys of four bits are no whole numbers: tests/python/test_rounded_records.py has their
    // choices.
    ASSERT_TRUE(options_.has_int4_records() || std::any_of(asked.begin(), asked.end(),
                                                           [&](const auto& each) {
                                                             return each.size() == query.size() &&
                                                                    is_best(layer, each, queries,
                                                                            chosen);
                                                           }))
        << "layer " << layer << " with " << sealed_before_ << " groups sealed";
    take_rounded(layer, sealed_before_);
    const auto is_seen = [&](int64_t b, int64_t part, int64_t token) {
      const auto group = static_cast<int32_t>(token / options_.group_tokens);
      return group >= sealed_before_ || memory_.is_sink(b, group) ||
             std::binary_search(chosen[part].begin(), chosen[part].end(), group);
    };
    expect_close(output, memory_.attend_over(layer, query, queries, 0.125, is_seen));
    ASSERT_EQ(engine_->sequences().layer(layer).sealed_groups,
              options_.sealed_groups(engine_->positions(layer)));
  }

  void expect_close(const std::vector<std::byte>& output, const std::vector<double>& expected) {
    const double most = options_.dtype == DType::kFloat32 ? 2e-5 : 0.02;
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(number(output, i), expected[i], most) << "element " << i;
    }
  }

  /// The ledger may have been charged for this many positions.
  void expect_context(int64_t positions) { context_max_ = std::max(context_max_, positions); }

  void compare_state() {
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      ASSERT_EQ(engine_->positions(layer), memory_.layer(layer).positions);
      // All but what the newest short append() has pushed out of the tail.
      const int64_t due = options_.sealed_groups(engine_->positions(layer)) -
                          engine_->sequences().layer(layer).sealed_groups;
      ASSERT_GE(due, 0) << "the tail is not sealed";
      ASSERT_LE(due * options_.group_tokens,
                options_.select_queries_max + options_.group_tokens - 1);
      context_max_ = std::max(context_max_, engine_->positions(layer));
    }
    batch_max_ = std::max(batch_max_, engine_->batch());
    const Arena need =
        memory_need(options_, engine_->context().stored_bytes(), batch_max_, context_max_);
    ASSERT_LE(engine_->context().ledger.peak(), need.total());
    ASSERT_LE(engine_->context().ledger.used(Use::kSummary), need.of(Use::kSummary));
    ASSERT_LE(engine_->context().ledger.used(Use::kTables), need.of(Use::kTables));
  }

  /// Every position of every sequence is what was appended, bit for bit; where records are
  /// rounded, of what is sealed as near as rounding is, and from then on the same.
  void compare_contents() {
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      const int64_t positions = engine_->positions(layer);
      take_rounded(layer, engine_->sequences().layer(layer).sealed_groups);
      for (int64_t sequence = 0; sequence < engine_->batch() && positions > 0; ++sequence) {
        const int64_t begin = draw(0, positions - 1);
        compare_positions(layer, sequence, begin, draw(begin, positions));
        compare_positions(layer, sequence, 0, positions);
      }
    }
  }

  void compare_positions(int64_t layer, int64_t sequence, int64_t begin, int64_t end) {
    const int64_t bytes = dtype_bytes(options_.dtype);
    const int64_t key_bytes = options_.head_dim * bytes, value_bytes = memory_.value_dim() * bytes;
    std::vector<std::byte> keys(options_.kv_heads * (end - begin) * key_bytes);
    std::vector<std::byte> values(options_.kv_heads * (end - begin) * value_bytes);
    const Status read = engine_->read_back(layer, sequence, begin, end, keys.data(), values.data());
    ASSERT_TRUE(read.is_ok()) << read.message();
    const auto& expected = memory_.layer(layer).sequences[sequence];
    const auto* key_rows = static_cast<const std::byte*>(raw(expected.keys, 0));
    const auto* value_rows = static_cast<const std::byte*>(raw(expected.values, 1));
    for (int64_t head = 0; head < options_.kv_heads; ++head) {
      for (int64_t position = begin; position < end; ++position) {
        const int64_t got = head * (end - begin) + position - begin;
        const int64_t want = position * options_.kv_heads + head;
        const auto expect_row = [&](const std::byte* read, const std::byte* rows, int64_t row) {
          ASSERT_EQ(std::memcmp(read + got * row, rows + want * row, row), 0);
        };
        expect_row(keys.data(), key_rows, key_bytes);
        expect_row(values.data(), value_rows, value_bytes);
      }
    }
  }

  void crop(int64_t positions) {
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      take_rounded(layer, engine_->sequences().layer(layer).sealed_groups);  // it may come back
    }
    memory_.crop(positions);
    const Status cropped = engine_->crop(positions);
    ASSERT_TRUE(cropped.is_ok()) << cropped.message();
    compare_state();
  }

  void select(const std::vector<int64_t>& indices) {
    memory_.select_sequences(indices);
    const Status selected = engine_->select_sequences(indices);
    ASSERT_TRUE(selected.is_ok()) << selected.message();
    batch_max_ = std::max(batch_max_, engine_->batch());
    compare_state();
  }

  void reset() {
    memory_.reset();
    const Status status = engine_->reset();
    ASSERT_TRUE(status.is_ok()) << status.message();
  }

  /// Random validity: left padding of each sequence, none for the longest.
  std::vector<uint8_t> left_padding(int64_t batch, int64_t tokens) {
    std::vector<uint8_t> valid(batch * tokens, 1);
    for (int64_t b = 1; b < batch; ++b) {
      std::fill_n(valid.begin() + b * tokens, draw(0, tokens - 1), 0);
    }
    return valid;
  }

  /// A random life: prefill, decoding, chunks, crops, reorders, resets.
  void live(int64_t steps, int64_t batch_max, int64_t chunk_max = 40) {
    int64_t batch = engine_->batch() > 0 ? engine_->batch() : draw(1, batch_max);
    for (int64_t step = 0; step < steps && !testing::Test::HasFatalFailure(); ++step) {
      const int64_t positions = engine_->positions(0);
      const int64_t action = engine_->batch() == 0 ? 0 : draw(0, 19);
      if (action <= 4) {
        const int64_t tokens = draw(1, chunk_max);
        const bool is_padded = engine_->batch() == 0 ? draw(0, 1) : draw(0, 4) == 0;
        read(batch, tokens, is_padded ? left_padding(batch, tokens) : std::vector<uint8_t>{});
      } else if (action <= 14) {
        forward(batch, draw(1, options_.select_queries_max));
      } else if (action <= 15) {
        crop(draw(positions / 2, positions));
      } else if (action <= 17) {
        std::vector<int64_t> indices(draw(1, batch_max));
        for (int64_t& index : indices) index = draw(0, batch - 1);
        select(indices);
        batch = static_cast<int64_t>(indices.size());
      } else if (action == 18) {
        const Status set = set_projection(draw(0, options_.layers - 1));
        ASSERT_TRUE(set.is_ok()) << set.message();
      } else if (draw(0, 2) == 0) {
        reset();
        batch = draw(1, batch_max);
      }
      if (draw(0, 9) == 0) compare_contents();
    }
    compare_contents();
  }

 private:
  bool is_best(int64_t layer, const std::vector<float>& query, int64_t queries,
               const std::vector<std::vector<int32_t>>& chosen) const {
    std::vector<std::vector<int32_t>> best;
    for (int64_t part = 0; part < memory_.parts(); ++part) {
      best.push_back(memory_.best(layer, part, sealed_before_, query, queries));
    }
    return chosen == best;
  }

  /// Number `i` of an array of the engine's element type.
  float number(const std::vector<std::byte>& array, int64_t i) const {
    const int64_t bytes = dtype_bytes(options_.dtype);
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<std::byte*>(&bits) + 4 - bytes, array.data() + i * bytes, bytes);
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  /// Where records are rounded: the first `sealed` groups are from now on what is on disk, sinks
  /// aside.
  void take_rounded(int64_t layer, int64_t sealed) {
    PlainMemory::Layer& retained = memory_.layer(layer);
    const int64_t tokens = options_.group_tokens;
    const int64_t first = std::exchange(retained.rounded, std::max(retained.rounded, sealed));
    if (options_.records == "model") return;
    for (int64_t sequence = 0; sequence < memory_.batch(); ++sequence) {
      for (int64_t group = first; group < sealed; ++group) {
        if (memory_.is_sink(sequence, group)) continue;
        const int64_t bytes = tokens * options_.kv_heads * dtype_bytes(options_.dtype);
        std::vector<std::byte> sides[2] = {std::vector<std::byte>(bytes * options_.head_dim),
                                           std::vector<std::byte>(bytes * memory_.value_dim())};
        const Status read =
            engine_->read_back(layer, sequence, group * tokens, (group + 1) * tokens,
                               sides[0].data(), sides[1].data());
        ASSERT_TRUE(read.is_ok()) << read.message();
        PlainMemory::Sequence& of = retained.sequences[sequence];
        take_rounded(of.keys, group, sides[0], options_.head_dim);
        take_rounded(of.values, group, sides[1], memory_.value_dim());
      }
    }
  }
  /// read: [kv_heads, group_tokens, dim].
  void take_rounded(std::vector<float>& side, int64_t group, const std::vector<std::byte>& read,
                    int64_t dim) {
    const int64_t tokens = options_.group_tokens;
    for (int64_t i = 0; i < tokens * options_.kv_heads * dim; ++i) {
      const int64_t head = i / dim / tokens, token = group * tokens + i / dim % tokens;
      float& was = side[(token * options_.kv_heads + head) * dim + i % dim];
      const float now = number(read, i);
      const float most = options_.has_int4_records() ? 2.5f : std::max(std::fabs(was) / 16, 0.01f);
      ASSERT_NEAR(now, was, most) << "of group " << group;
      was = now;
    }
  }

  EngineOptions options_;
  CallerMemory& caller_;
  PlainMemory memory_;
  std::unique_ptr<Engine> engine_;
  std::mt19937_64 random_;
  std::vector<uint16_t> halves_[3];
  std::vector<std::byte> outputs_;
  bool reads_ = false;
  int64_t sealed_before_ = 0;  // of the layer that has attended last, when it did
  int64_t batch_max_ = 0;
  int64_t context_max_ = 0;
};

}  // namespace kvswap
