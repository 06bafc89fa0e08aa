#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/element.h"
#include "kvswap/cache.h"

namespace kvswap {

/// A folder that is gone with it.
class Folder {
 public:
  Folder() {
    path_ = std::filesystem::temp_directory_path() / "kvswap-core-XXXXXX";
    EXPECT_NE(::mkdtemp(path_.data()), nullptr);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline CacheOptions covering(const std::string& directory,
                             ElementType dtype = ElementType::kFloat32) {
  CacheOptions options;
  options.shape = {.layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 16, .dtype = dtype};
  options.settings.rank = 8;
  options.settings.groups_max = 60;
  options.settings.pages_max = 60;
  options.settings.tail_tokens = 8;
  options.directory = directory;
  return options;
}

/// What a pass of so many tokens is to tests that decode where they can.
inline Pass pass_of(int64_t tokens, const Cache& session) {
  const bool is_short = tokens <= session.options().settings.select_queries_max;
  return is_short ? Pass::kDecode : Pass::kPrefill;
}

/// Drives one layer and keeps all it was given, for attention written down plainly.
class Plain {
 public:
  Plain(const CacheOptions& options, int64_t batch) : shape_(options.shape), batch_(batch) {}

  /// Appends random tokens to all layers, attends, and compares the last layer's answer.
  void step(Cache& session, int64_t tokens, double tolerance) {
    pass(session, pass_of(tokens, session), tokens, tolerance);
  }
  void pass(Cache& session, Pass kind, int64_t tokens, double tolerance) {
    const int64_t kv_count = batch_ * shape_.kv_heads * tokens * shape_.head_dim;
    const auto keys = random(kv_count);
    const auto values = random(kv_count);
    const auto query = random(batch_ * shape_.heads * tokens * shape_.head_dim);
    const auto k = stored(keys), v = stored(values), q = stored(query);
    std::vector<std::byte> output(q.size());
    const NewTokens added = NewTokens::packed(k.data(), v.data(), shape_, batch_, tokens);
    const Queries asked = Queries::packed(q.data(), shape_.heads, tokens, shape_.head_dim);
    const CapAndSinks terms = {.softcap = softcap, .sinks = sinks.empty() ? nullptr : sinks.data()};
    session.begin_pass(kind);
    for (int64_t layer = 0; layer < shape_.layers; ++layer) {
      if (extends) {
        session.extend(layer, added, asked, 0.25f, output.data(), terms);
        continue;
      }
      session.append(layer, added);
      session.attend(layer, asked, 0.25f, output.data(), terms);
    }
    keep(keys, values, tokens);
    for (int64_t b = 0; b < batch_; ++b) compare(output, query, b, tokens, tolerance);
  }

  void pad(int64_t sequence, int64_t positions) { padding_[sequence] = positions; }

  bool extends = false;  // append() and attend() in one
  float softcap = 0;
  std::vector<float> sinks;  // [heads]; empty: none

 private:
  std::vector<float> random(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> numbers(count);
    for (float& number : numbers) {
      number = normal(generator_);
      if (shape_.dtype == ElementType::kBFloat16) {
        number = to_float(from_float<BFloat16>(number));
      }
    }
    return numbers;
  }

  std::vector<std::byte> stored(const std::vector<float>& numbers) const {
    std::vector<std::byte> bytes(numbers.size() * shape_.element_bytes());
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (shape_.dtype == ElementType::kBFloat16) {
        reinterpret_cast<BFloat16*>(bytes.data())[i] = from_float<BFloat16>(numbers[i]);
      } else {
        reinterpret_cast<float*>(bytes.data())[i] = numbers[i];
      }
    }
    return bytes;
  }

  void keep(const std::vector<float>& keys, const std::vector<float>& values, int64_t tokens) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t row = 0; row < batch_ * shape_.kv_heads; ++row) {
        const auto at = (row * tokens + t) * shape_.head_dim;
        keys_.insert(keys_.end(), &keys[at], &keys[at] + shape_.head_dim);
        values_.insert(values_.end(), &values[at], &values[at] + shape_.head_dim);
      }
    }
    positions_ += tokens;
  }

  const float* entry(const std::vector<float>& all, int64_t position, int64_t b,
                     int64_t head) const {
    return &all[((position * batch_ + b) * shape_.kv_heads + head) * shape_.head_dim];
  }

  void compare(const std::vector<std::byte>& output, const std::vector<float>& query, int64_t b,
               int64_t tokens, double tolerance) const {
    const int64_t dim = shape_.head_dim;
    for (int64_t h = 0; h < shape_.heads; ++h) {
      const int64_t kv = h / (shape_.heads / shape_.kv_heads);
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t end = positions_ - tokens + t + 1;
        if (end <= padding_[b]) continue;
        std::vector<double> sum(dim);
        double total = sinks.empty() ? 0 : std::exp(sinks[h]);
        for (int64_t c = padding_[b]; c < end; ++c) {
          double score = 0;
          for (int64_t d = 0; d < dim; ++d) {
            score +=
                query[((b * shape_.heads + h) * tokens + t) * dim + d] * entry(keys_, c, b, kv)[d];
          }
          score *= 0.25;
          if (softcap > 0) score = softcap * std::tanh(score / softcap);
          const double weight = std::exp(score);
          total += weight;
          for (int64_t d = 0; d < dim; ++d) sum[d] += weight * entry(values_, c, b, kv)[d];
        }
        for (int64_t d = 0; d < dim; ++d) {
          const int64_t at = ((b * tokens + t) * shape_.heads + h) * dim + d;
          const float got = shape_.dtype == ElementType::kBFloat16
                                ? to_float(reinterpret_cast<const BFloat16*>(output.data())[at])
                                : reinterpret_cast<const float*>(output.data())[at];
          ASSERT_NEAR(got, sum[d] / total, tolerance) << "row " << t << " of sequence " << b;
        }
      }
    }
  }

  ModelShape shape_;
  int64_t batch_;
  std::mt19937 generator_{7};
  std::vector<float> keys_;  // [positions, batch, kv_heads, head_dim]
  std::vector<float> values_;
  int64_t positions_ = 0;
  int64_t padding_[4] = {};
};

}  // namespace kvswap
