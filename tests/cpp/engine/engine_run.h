#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "reference_engine.h"

namespace kvswap {

/// A directory of its own for a test, on the disk.
class TestDirectory {
 public:
  TestDirectory() {
    path_ = std::filesystem::temp_directory_path() / "kvswap-engine-XXXXXX";
    EXPECT_NE(::mkdtemp(path_.data()), nullptr);
  }
  ~TestDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  bool is_empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::string path_;
};

/// Two layers of a small model; a group's record fills at least a block of O_DIRECT.
inline EngineOptions small_options(const std::string& directory, int64_t group_tokens = 4) {
  EngineOptions options;
  options.layers = 2;
  options.query_heads = 4;
  options.kv_heads = 2;
  options.head_dim = std::max<int64_t>(8, 128 / group_tokens);
  options.directory = directory;
  options.file_extend_bytes = 1 << 20;
  options.group_tokens = group_tokens;
  options.ranks = {5, 8};
  options.groups_max = 4;
  options.pages_max = 8;
  options.sink_tokens = 4;
  options.tail_tokens = 8;
  options.select_queries_max = 4;
  return options;
}

/// An engine and its reference, driven through the same calls and compared after each.
class EngineRun {
 public:
  EngineRun(const EngineOptions& options, uint64_t seed, ParallelFor parallel = nullptr)
      : options_(options), reference_(options), random_(seed) {
    auto engine = Engine::create(options, std::move(parallel));
    EXPECT_TRUE(engine.is_ok()) << engine.status().message();
    if (engine.is_ok()) engine_ = std::move(engine.value());
  }

  Engine& engine() { return *engine_; }
  /// The engine was saved, or shared: what has left the tail is sealed.
  void seal_overflow() {
    if (reference_.batch() == 0) return;  // the engine alone was driven
    std::vector<int64_t> all(engine_->batch());
    std::iota(all.begin(), all.end(), 0);
    reference_.select_sequences(all);
  }
  /// Goes on with another engine, which holds what this one's does.
  std::unique_ptr<Engine> go_on_with(std::unique_ptr<Engine> other) {
    seal_overflow();
    return std::exchange(engine_, std::move(other));
  }
  ReferenceEngine& reference() { return reference_; }
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
    const int64_t count = batch * options_.kv_heads * tokens * options_.head_dim;
    return {tokens, numbers(count, 3), numbers(count, 64, 1.0f / 16)};
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
  QueryView view(const std::vector<float>& query, int64_t queries) {
    const int64_t dim = options_.head_dim;
    return {.data = raw(query, 2),
            .batch_stride = options_.query_heads * queries * dim,
            .head_stride = queries * dim,
            .query_stride = dim,
            .heads = options_.query_heads,
            .queries = queries,
            .dtype = options_.dtype};
  }
  KeyValueView view(const Tokens& tokens, int64_t batch) {
    const int64_t head = tokens.tokens * options_.head_dim;
    const int64_t sequence = options_.kv_heads * head;
    return {.keys = raw(tokens.keys, 0),
            .values = raw(tokens.values, 1),
            .key_batch_stride = sequence,
            .key_head_stride = head,
            .key_token_stride = options_.head_dim,
            .value_batch_stride = sequence,
            .value_head_stride = head,
            .value_token_stride = options_.head_dim,
            .batch = batch,
            .tokens = tokens.tokens};
  }

  Status set_projection(int64_t layer) {
    const int64_t count = options_.kv_heads * options_.head_dim * options_.ranks[layer];
    auto& target = reference_.layer(layer);
    target.key_projection = numbers(count, 2);
    target.query_projection = numbers(count, 2);
    target.is_planned = false;
    return engine_->set_projection(layer, options_.ranks[layer], target.key_projection.data(),
                                   target.query_projection.data());
  }

  /// Says that a pass of so many tokens decodes, where it can.
  Status begin(int64_t tokens) {
    const bool is_short = tokens <= options_.select_queries_max;
    return engine_->begin_pass(is_short ? Pass::kDecode : Pass::kPrefill);
  }
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
    output.assign(query.size() * dtype_bytes(options_.dtype), std::byte{0xab});
    return engine_->attend(
        {.layer = layer, .query = view(query, queries), .output = output.data(), .scale = 0.125f});
  }

  /// One forward pass of `tokens` new columns through all layers.
  void forward(int64_t batch, int64_t tokens, const std::vector<uint8_t>& valid = {}) {
    if (!valid.empty()) {
      const auto* flags = reinterpret_cast<const bool*>(valid.data());
      reference_.declare(batch, tokens, flags);
      const Status declared = engine_->declare(batch, tokens, flags);
      ASSERT_TRUE(declared.is_ok()) << declared.message();
    }
    bool has_looked = false;
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      if (!has_looked && draw(0, 3) > 0 && engine_->batch() > 0) look_ahead(layer, tokens);
      has_looked = layer + 1 < options_.layers && draw(0, 1) > 0 && engine_->batch() > 0;
      if (has_looked) look_ahead(layer + 1, tokens);
      append(layer, batch, tokens);
      if (tokens <= options_.select_queries_max && draw(0, 9) > 0)
        attend_and_compare(layer, tokens);
    }
    compare_state();
  }

  void append(int64_t layer, int64_t batch, int64_t tokens) {
    const Tokens drawn = draw_tokens(batch, tokens);
    reference_.append(layer, batch, drawn);
    const Status appended = give(layer, drawn, batch);
    ASSERT_TRUE(appended.is_ok()) << appended.message();
  }

  void look_ahead(int64_t layer, int64_t queries) {
    const std::vector<float> query = draw_query(engine_->batch(), queries);
    reference_.look_ahead(layer, query, queries);
    const Status planned = ask(layer, query, queries);
    ASSERT_TRUE(planned.is_ok()) << planned.message();
  }

  void attend_and_compare(int64_t layer, int64_t queries) {
    if (engine_->needs_projection(layer)) {
      const Status set = set_projection(layer);
      ASSERT_TRUE(set.is_ok()) << set.message();
    }
    const std::vector<float> query = draw_query(engine_->batch(), queries);
    const std::vector<double> expected = reference_.attend(layer, query, queries, 0.125);
    std::vector<std::byte> output;
    const Status attended = attend(layer, query, queries, output);
    ASSERT_TRUE(attended.is_ok()) << attended.message();
    ASSERT_EQ(engine_->last_selection(layer), reference_.layer(layer).chosen);
    expect_close(output, expected);
    outputs_.insert(outputs_.end(), output.begin(), output.end());
  }

  void expect_close(const std::vector<std::byte>& output, const std::vector<double>& expected) {
    const bool is_float = options_.dtype == DType::kFloat32;
    for (size_t i = 0; i < expected.size(); ++i) {
      uint32_t bits = 0;
      std::memcpy(reinterpret_cast<std::byte*>(&bits) + (is_float ? 0 : 2),
                  output.data() + i * dtype_bytes(options_.dtype), dtype_bytes(options_.dtype));
      float value;
      std::memcpy(&value, &bits, sizeof(value));
      ASSERT_NEAR(value, expected[i], is_float ? 2e-5 : 0.02) << "element " << i;
    }
  }

  /// The ledger may have been charged for this many columns.
  void expect_context(int64_t columns) { context_max_ = std::max(context_max_, columns); }

  void compare_state() {
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      ASSERT_EQ(engine_->columns(layer), reference_.layer(layer).columns);
      ASSERT_EQ(engine_->sequences().layer(layer).sealed_groups, reference_.layer(layer).sealed);
      context_max_ = std::max(context_max_, engine_->columns(layer));
    }
    batch_max_ = std::max(batch_max_, engine_->batch());
    const MemoryNeed need =
        memory_need(options_, engine_->parts().record_bytes(), batch_max_, context_max_);
    ASSERT_LE(engine_->parts().ledger.peak(), need.total());
    ASSERT_LE(engine_->parts().ledger.used(Use::kSummary), need.summary);
    ASSERT_LE(engine_->parts().ledger.used(Use::kTables), need.tables);
  }

  /// Every column of every sequence is what was appended, bit for bit.
  void compare_contents() {
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      const int64_t columns = engine_->columns(layer);
      for (int64_t sequence = 0; sequence < engine_->batch() && columns > 0; ++sequence) {
        const int64_t begin = draw(0, columns - 1);
        compare_columns(layer, sequence, begin, draw(begin, columns));
        compare_columns(layer, sequence, 0, columns);
      }
    }
  }

  void compare_columns(int64_t layer, int64_t sequence, int64_t begin, int64_t end) {
    const int64_t dim = options_.head_dim;
    const int64_t bytes = dtype_bytes(options_.dtype);
    std::vector<std::byte> keys(options_.kv_heads * (end - begin) * dim * bytes);
    std::vector<std::byte> values(keys.size());
    const Status read = engine_->read_back(layer, sequence, begin, end, keys.data(), values.data());
    ASSERT_TRUE(read.is_ok()) << read.message();
    const auto& expected = reference_.layer(layer).sequences[sequence];
    const auto* key_rows = static_cast<const std::byte*>(raw(expected.keys, 0));
    const auto* value_rows = static_cast<const std::byte*>(raw(expected.values, 1));
    for (int64_t head = 0; head < options_.kv_heads; ++head) {
      for (int64_t column = begin; column < end; ++column) {
        const int64_t got = (head * (end - begin) + column - begin) * dim * bytes;
        const int64_t want = (column * options_.kv_heads + head) * dim * bytes;
        ASSERT_EQ(std::memcmp(keys.data() + got, key_rows + want, dim * bytes), 0);
        ASSERT_EQ(std::memcmp(values.data() + got, value_rows + want, dim * bytes), 0);
      }
    }
  }

  void crop(int64_t columns) {
    reference_.crop(columns);
    const Status cropped = engine_->crop(columns);
    ASSERT_TRUE(cropped.is_ok()) << cropped.message();
    compare_state();
  }

  void select(const std::vector<int64_t>& indices) {
    reference_.select_sequences(indices);
    const Status selected = engine_->select_sequences(indices);
    ASSERT_TRUE(selected.is_ok()) << selected.message();
    batch_max_ = std::max(batch_max_, engine_->batch());
    compare_state();
  }

  void reset() {
    reference_.reset();
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
      const int64_t columns = engine_->columns(0);
      const int64_t action = engine_->batch() == 0 ? 0 : draw(0, 19);
      if (action <= 4) {
        const int64_t tokens = draw(1, chunk_max);
        const bool is_padded = engine_->batch() == 0 ? draw(0, 1) : draw(0, 4) == 0;
        forward(batch, tokens, is_padded ? left_padding(batch, tokens) : std::vector<uint8_t>{});
      } else if (action <= 14) {
        forward(batch, draw(1, options_.select_queries_max));
      } else if (action <= 15) {
        crop(draw(columns / 2, columns));
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
  EngineOptions options_;
  ReferenceEngine reference_;
  std::unique_ptr<Engine> engine_;
  std::mt19937_64 random_;
  std::vector<uint16_t> halves_[3];
  std::vector<std::byte> outputs_;
  int64_t batch_max_ = 0;
  int64_t context_max_ = 0;
};

}  // namespace kvswap
