// An engine that chooses clusters of similar keys, and what it was given.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine_run.h"
#include "methods/clusters/cluster_numbers.h"
#include "methods/clusters/cluster_selector.h"

namespace kvswap {

inline EngineOptions in_clusters(EngineOptions options) {
  options.ranks = {};
  options.rows = "centroid";
  options.grouping = "clusters";
  options.look_ahead = "trust";
  options.cluster_tokens = 4;
  options.cluster_tokens_max = 10;
  options.pending_tokens = 5;
  options.groups_max = 6;
  options.pages_max = 24;
  return options;
}

inline EngineOptions cluster_options(const std::string& directory, int64_t group_tokens = 4) {
  return in_clusters(small_options(directory, group_tokens));
}

/// A token's K or V of one head as e4m3 has it, with a power of two of its own: four significant
/// bits, and steps of 2^-9 of that power at least. For numbers that are far from fp32's ends.
inline std::vector<float> rounded_row(std::vector<float> row) {
  const auto exponent = [](float value) {
    return static_cast<int>(std::bit_cast<uint32_t>(value) >> 23 & 255) - 127;
  };
  float largest = 0;
  for (const float each : row) largest = std::max(largest, std::fabs(each));
  int power = std::max(-117, exponent(largest) - 9);
  while (largest > std::ldexp(448.0f, power)) ++power;
  for (float& each : row) {
    // Beside a number whose last bit is the step there is no place for what is smaller.
    const int step = std::max(exponent(each) - 3, power - 9);
    const float beside = 1.5f * std::bit_cast<float>(static_cast<uint32_t>(step + 23 + 127) << 23);
    each = (each + beside) - beside;
  }
  return row;
}

/// An engine of clusters, and what it was given, which is told what is attended.
class ClusterRun {
 public:
  /// Makes the disk well.
  using Mend = std::function<void()>;

  ClusterRun(const EngineOptions& options, uint64_t seed)
      : options_(options), run_(options, seed) {}

  EngineRun& run() { return run_; }
  Engine& engine() { return run_.engine(); }
  const ClusterRow& row(int64_t layer, int64_t part) {
    return engine().context().clusters->of(layer, part);
  }
  int64_t parts() { return engine().sequences().size(); }
  int64_t heads_apart() { return engine().context().options.heads_apart; }

  /// Where tokens are rounded: keys and values that e4m3 does not hold, each token's of a size of
  /// its own.
  Tokens draw_tokens(int64_t batch, int64_t tokens) {
    Tokens drawn = run_.draw_tokens(batch, tokens);
    if (options_.records != "fp8") return drawn;
    drawn.keys = run_.numbers(std::ssize(drawn.keys), 63, 1.0f / 64);
    for (std::vector<float>* side : {&drawn.keys, &drawn.values}) {
      float unit = 1;
      for (size_t i = 0; i < side->size(); ++i) {
        if (static_cast<int64_t>(i) % options_.head_dim == 0) {
          unit = std::ldexp(1.0f, -static_cast<int>(run_.draw(0, 12)));
        }
        (*side)[i] *= unit;
      }
    }
    return drawn;
  }

  void append(int64_t batch, int64_t tokens, const std::vector<uint8_t>& valid = {},
              const Mend& mend = nullptr) {
    if (!valid.empty()) {
      const auto* flags = reinterpret_cast<const bool*>(valid.data());
      run_.memory().declare(batch, tokens, flags);
      repeat(mend, [&] { return engine().declare(batch, tokens, flags); });
    }
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      const Tokens drawn = draw_tokens(batch, tokens);
      repeat(mend, [&] { return run_.give(layer, drawn, batch); });
      run_.memory().append(layer, batch, drawn);
    }
    run_.compare_state();
  }

  /// A forward pass of so many tokens, some layers of which look ahead; what a disk refuses is
  /// asked again once it is mended.
  void step(int64_t batch, int64_t tokens, const Mend& mend = nullptr) {
    ASSERT_TRUE(run_.begin(tokens).is_ok());
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      const std::vector<float> ahead = run_.draw_query(batch, tokens);
      const bool looks = run_.draw(0, 1) == 0;
      if (looks) {
        repeat(mend, [&] { return engine().look_ahead(layer, run_.view(ahead, tokens), 0.125f); });
      }
      const Tokens drawn = draw_tokens(batch, tokens);
      run_.memory().append(layer, batch, drawn);
      repeat(mend, [&] { return engine().append(layer, run_.view(drawn, batch)); });
      const std::vector<float> query = run_.draw_query(batch, tokens);
      std::vector<std::byte> output;
      const bool is_trusted = options_.look_ahead == "trust";
      const bool stands =
          looks && is_trusted && engine().sequences().layer(layer).sealed_groups > 0;
      auto seen = seen_tokens(
          layer, stands ? engine().last_selection(layer) : choice(layer, query, tokens));
      PlainMemory read = as_read(layer);
      const int refused = refused_;
      const bool asks_first = run_.draw(0, 1) == 0;
      repeat(mend, [&] {
        // One that was refused after it had attended enters its tokens first, and chooses anew.
        if (refused != refused_ && asks_first && is_trusted) {
          KVSWAP_RETURN_IF_ERROR(engine().look_ahead(layer, run_.view(query, tokens), 0.125f));
          seen = seen_tokens(layer, engine().last_selection(layer));
        }
        if (refused != refused_) read = as_read(layer);
        return run_.attend(layer, query, tokens, output);
      });
      if (testing::Test::HasFatalFailure()) return;
      const auto expected = read.attend_over(
          layer, query, tokens, 0.125,
          [&](int64_t, int64_t part, int64_t token) { return seen[part][token] != 0; });
      const bool is_known = refused == refused_ || (asks_first && is_trusted);
      if (is_known || engine().sequences().all_fit(layer)) run_.expect_close(output, expected);
      note_missed(layer, query, tokens, seen, std::move(read));
      check_rows(layer);
    }
    run_.compare_state();
  }

  /// A random life: prompts, long chunks, steps, crops, beams that come and go, other texts.
  /// Before each of these something may happen.
  void live(int64_t actions, const Mend& mend = nullptr,
            const std::function<void()>& before_each = nullptr) {
    int64_t batch = engine().batch() > 0 ? engine().batch() : run_.draw(1, 3);
    for (int64_t i = 0; i < actions && !testing::Test::HasFatalFailure(); ++i) {
      if (before_each) before_each();
      const int64_t action = engine().batch() == 0 ? 0 : run_.draw(0, 19);
      const int64_t positions = engine().batch() == 0 ? 0 : engine().positions(0);
      if (action <= 2) {
        const int64_t tokens = run_.draw(5, 90);
        const bool is_padded = run_.draw(0, 1) == 0;
        append(batch, tokens, is_padded ? run_.left_padding(batch, tokens) : std::vector<uint8_t>{},
               mend);
      } else if (action <= 14) {
        step(batch, run_.draw(1, 4), mend);
      } else if (action <= 16) {
        const int64_t left = run_.draw(positions / 2, positions);
        crop(left, mend);
      } else if (action <= 18) {
        std::vector<int64_t> indices(run_.draw(1, 3));
        for (int64_t& index : indices) index = run_.draw(0, batch - 1);
        repeat(mend, [&] { return engine().select_sequences(indices); });
        run_.memory().select_sequences(indices);
        batch = std::ssize(indices);
        run_.compare_state();
      } else if (run_.draw(0, 3) == 0) {
        run_.reset();
        batch = run_.draw(1, 3);
      }
      if (run_.draw(0, 9) == 0) check_all(mend);
    }
    if (!testing::Test::HasFatalFailure()) check_all(mend);
  }

  /// Of all layers: where tokens stand, and every byte. A write that failed unnoticed is told of,
  /// and done, before.
  void check_all(const Mend& mend = nullptr) {
    if (mend) {
      mend();
      (void)engine().context().store->writes().flush().is_ok();
    }
    for (int64_t layer = 0; layer < options_.layers && engine().batch() > 0; ++layer) {
      check_rows(layer);
      check_records(layer);
    }
    compare_contents();
  }

  /// Of read_back(): here, tokens that wait stay what was given.
  void compare_contents() {
    const PlainMemory before = run_.memory();
    run_.compare_contents();
    run_.memory() = before;
  }

  void crop(int64_t positions, const Mend& mend = nullptr) {
    std::vector<int64_t> sealed;
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      sealed.push_back(engine().sequences().layer(layer).sealed_groups);
    }
    const PlainMemory before = run_.memory();  // what is padding alone now may have had sinks
    repeat(mend, [&] { return engine().crop(positions); });
    run_.memory().crop(positions);
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      // Back in the tail, as their records have them.
      const int64_t left = engine().sequences().layer(layer).sealed_groups;
      for (int64_t part = 0; part < parts(); ++part) {
        if (!mend) {
          const int64_t group_tokens = options_.group_tokens;
          round_tokens(run_.memory(), layer, part, left, sealed[layer], [&](int64_t token) {
            return !before.is_sink(part / heads_apart(), token / group_tokens);
          });
        } else {
          note_tail(layer, part, left);
        }
      }
    }
    run_.compare_state();
  }

  /// Each token of a row stands where exactly one thing has it, and its cluster knows it. After an
  /// error the newest that were sealed may have entered no cluster yet: their groups have them.
  enum class Behind { kNever, kMaybe };
  void check_rows(int64_t layer, Behind behind = Behind::kNever) {
    const int64_t group_tokens = options_.group_tokens;
    const int64_t sealed = engine().sequences().layer(layer).sealed_groups * group_tokens;
    for (int64_t part = 0; part < parts(); ++part) {
      const auto& [clusters, pages] = row(layer, part);
      const int64_t b = part / heads_apart();
      ASSERT_LE(clusters.left(), sealed);
      if (behind == Behind::kNever) {
        ASSERT_EQ(clusters.left(), sealed);
        ASSERT_LE(std::ssize(pages.waiting()), options_.method().clusters.waiting_max());
      }
      std::vector<int64_t> sizes(clusters.table().count());
      std::map<int64_t, uint64_t> masks;
      int64_t waiting = 0;
      for (int64_t token = 0; token < clusters.left(); ++token) {
        const bool is_outside =
            !run_.memory().validity()[b][token] || run_.memory().is_sink(b, token / group_tokens);
        const int32_t cluster = clusters.table().place()[token];
        ASSERT_EQ(is_outside, cluster == kInSinks) << token;
        if (is_outside) {
          ASSERT_EQ(pages.place(token), -1);
          continue;
        }
        if (cluster >= 0) ++sizes[cluster];
        if (pages.place(token) < 0) {
          const int64_t at = pages.waiting_at(token);
          ASSERT_GE(at, 0) << token << " stands nowhere";
          ASSERT_EQ(pages.waiting()[at], token);
          ++waiting;
        } else {
          masks[pages.place(token) / group_tokens] |= uint64_t{1}
                                                      << pages.place(token) % group_tokens;
        }
      }
      ASSERT_EQ(waiting, std::ssize(pages.waiting()));
      for (int64_t cluster = 0; cluster < clusters.table().count(); ++cluster) {
        ASSERT_EQ(clusters.table().size()[cluster], sizes[cluster]);
        ASSERT_LE(sizes[cluster], options_.cluster_tokens_max);
        pages.each_page(cluster, [&](int64_t slot) {
          ASSERT_EQ(pages.mask(slot), masks[slot]);
          ASSERT_TRUE(engine().context().store->tables().has_page(layer, part, page_id(slot)));
          masks.erase(slot);
        });
      }
      ASSERT_TRUE(masks.empty());
      check_numbers(layer, part, behind);
    }
  }

  /// What would be saved of a row has no fault, and no number is lost: each is of a cluster with
  /// tokens, is waited for, has pages in which others' tokens stand, or is given to a new one.
  void check_numbers(int64_t layer, int64_t part, Behind behind) {
    const auto& [clusters, pages] = row(layer, part);
    const ClusterTable& table = clusters.table();
    ClusterNumbers numbers;
    for (int64_t token = 0; token < clusters.left(); ++token) {
      numbers.clusters.push_back(table.place()[token]);
      numbers.places.push_back(pages.place(token));
    }
    numbers.variances.assign(table.variance().begin(), table.variance().end());
    numbers.comparable.assign(table.comparable().begin(), table.comparable().end());
    numbers.threshold = clusters.threshold().variance;
    numbers.settled_at = clusters.threshold().settled_at;
    for (const auto& [cluster, token] : clusters.waiting().all()) {
      numbers.pending.push_back({static_cast<int32_t>(cluster), static_cast<int32_t>(token)});
    }
    const auto fault = fault_of(numbers, {.tokens = clusters.left(),
                                          .room = std::ssize(table.place()),
                                          .width = table.width(),
                                          .page_tokens = options_.group_tokens,
                                          .pages_a_cluster = pages_a_cluster(options_.method()),
                                          .options = options_.method().clusters});
    const bool has_many =
        behind == Behind::kMaybe && fault && fault->must.starts_with("let tokens");
    ASSERT_TRUE(!fault || has_many) << fault->tensor << " must " << fault->must;
    const std::vector<int64_t> waited_for = clusters.waiting().clusters();
    int64_t in_use = 0;
    for (int64_t c = 0; c < table.count(); ++c) {
      const bool is_named = std::ranges::binary_search(waited_for, c) || pages.pages(c) > 0;
      in_use += table.size()[c] > 0 || is_named ? 1 : 0;
    }
    if (behind == Behind::kNever) {
      ASSERT_EQ(table.numbers().used(), in_use);
    } else {
      ASSERT_GE(table.numbers().used(), in_use);
    }
  }

  /// The pages of each cluster are neighbours on disk.
  void check_neighbours(int64_t layer) {
    for (int64_t part = 0; part < parts(); ++part) {
      const auto& [clusters, pages] = row(layer, part);
      for (int64_t cluster = 0; cluster < clusters.table().count(); ++cluster) {
        std::set<int64_t> places;
        pages.each_page(cluster, [&](int64_t slot) {
          places.insert(engine().context().store->offset_bytes(layer, part, page_id(slot)) /
                        engine().context().stored_bytes());
        });
        if (places.empty()) continue;
        ASSERT_EQ(*places.rbegin() - *places.begin() + 1, std::ssize(places)) << cluster;
      }
    }
  }

  /// Clusters whose pages a choice has.
  int64_t clusters_of(const std::vector<std::vector<int32_t>>& chosen) {
    const int64_t slots = pages_a_cluster(options_.method());
    int64_t count = 0;
    for (const std::vector<int32_t>& ids : chosen) {
      std::set<int64_t> clusters;
      for (const int32_t id : ids) clusters.insert(slot_of_page(id) / slots);
      count += std::ssize(clusters);
    }
    return count;
  }

  /// Every record of every cluster holds what its tokens are, byte for byte.
  void check_records(int64_t layer) {
    EngineContext& parts = const_cast<EngineContext&>(engine().context());
    const RecordShape shape = parts.options.record_shape();
    for (int64_t part = 0; part < this->parts(); ++part) {
      const auto& [clusters, pages] = row(layer, part);
      std::map<int64_t, std::vector<int64_t>> tokens_of;  // slots of pages -> tokens
      for (int64_t token = 0; token < clusters.left(); ++token) {
        const int32_t place = pages.place(token);
        if (place >= 0) tokens_of[place / shape.group_tokens].push_back(token);
      }
      if (tokens_of.empty()) continue;
      auto memory = share_aligned_bytes(std::ssize(tokens_of) * parts.record_bytes(), AtEnd::kLeft);
      ASSERT_TRUE(memory.is_ok());
      Fetch fetch;
      fetch.layer = layer;
      std::byte* target = memory.value().get();
      for (const auto& [slot, tokens] : tokens_of) {
        fetch.loads.push_back({.sequence = part, .group = page_id(slot), .target = target});
        target += parts.record_bytes();
      }
      ASSERT_TRUE(parts.fetcher->submit(fetch).is_ok());
      ASSERT_TRUE(parts.fetcher->finish(fetch).is_ok());
      const std::byte* record = memory.value().get();
      for (const auto& [slot, tokens] : tokens_of) {
        for (const int64_t token : tokens) {
          check_token(layer, part, token, record);
          if (testing::Test::HasFatalFailure()) return;
        }
        record += parts.record_bytes();
      }
    }
  }

  void repeat(const Mend& mend, const std::function<Status()>& call) {
    Status called = call();
    if (!called.is_ok() && mend) {
      ++refused_;
      ASSERT_EQ(called.code(), StatusCode::kStorage) << called.message();
      for (int64_t layer = 0; layer < options_.layers; ++layer) check_rows(layer, Behind::kMaybe);
      mend();
      called = call();
    }
    ASSERT_TRUE(called.is_ok()) << called.message();
  }
  int refused() const { return refused_; }
  /// With audits: the shares of the first sequence's attention that a layer's steps missed:
  /// means over heads and queries.
  const std::vector<double>& missed(int64_t layer) { return missed_[layer]; }

 private:
  /// Its page's record has what it is.
  void check_token(int64_t layer, int64_t part, int64_t token, const std::byte* record) {
    const RecordShape shape = engine().context().options.record_shape();
    PlainMemory::Sequence& retained = run_.memory().layer(layer).sequences[part / heads_apart()];
    const int64_t row_bytes = shape.head_dim * shape.element_bytes;
    const int64_t at = row(layer, part).pages.place(token) % shape.group_tokens;
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      const int64_t of_model = heads_apart() > 1 ? part % heads_apart() : head;
      const std::vector<float> rows[] = {on_disk(row_at(retained.keys, token, of_model)),
                                         on_disk(row_at(retained.values, token, of_model))};
      const std::byte* key = record + (2 * head * shape.group_tokens + at) * row_bytes;
      ASSERT_EQ(std::memcmp(key, run_.raw(rows[0], 0), row_bytes), 0) << token;
      const std::byte* value = key + shape.group_tokens * row_bytes;
      ASSERT_EQ(std::memcmp(value, run_.raw(rows[1], 1), row_bytes), 0) << token;
    }
  }

  /// Of one token and KV head.
  std::span<float> row_at(std::vector<float>& side, int64_t token, int64_t head) {
    const int64_t at = (token * options_.kv_heads + head) * options_.head_dim;
    return std::span(side).subspan(at, options_.head_dim);
  }
  std::vector<float> on_disk(std::span<const float> row) {
    const std::vector<float> values(row.begin(), row.end());
    return options_.records == "fp8" ? rounded_row(values) : values;
  }

  /// Of these groups, sinks aside.
  void round_tokens(PlainMemory& memory, int64_t layer, int64_t part, int64_t first_group,
                    int64_t end_group, const std::function<bool(int64_t token)>& is_read = {}) {
    const int64_t b = part / heads_apart();
    PlainMemory::Layer& retained = memory.layer(layer);
    const int64_t end = std::min(retained.positions, end_group * options_.group_tokens);
    for (int64_t token = first_group * options_.group_tokens; token < end; ++token) {
      if (memory.is_sink(b, token / options_.group_tokens)) continue;
      if (is_read && !is_read(token)) continue;
      for (int64_t head = 0; head < options_.kv_heads; ++head) {
        if (head % heads_apart() != part % heads_apart()) continue;
        for (std::vector<float>* side :
             {&retained.sequences[b].keys, &retained.sequences[b].values}) {
          const std::span<float> row = row_at(*side, token, head);
          std::ranges::copy(on_disk(row), row.begin());
        }
      }
    }
  }

  /// A token's K or V is as it was given, or as its record has it: so it is from now on.
  void note_side(std::vector<float>& side, int64_t token, int64_t head, const std::byte* held) {
    const std::span<float> row = row_at(side, token, head);
    const std::vector<float> given(row.begin(), row.end()), rounded = on_disk(row);
    const size_t bytes = row.size() * dtype_bytes(options_.dtype);
    if (std::memcmp(held, run_.raw(given, 1), bytes) == 0) return;
    ASSERT_EQ(std::memcmp(held, run_.raw(rounded, 1), bytes), 0) << token;
    std::ranges::copy(rounded, row.begin());
  }
  void note_token(int64_t layer, int64_t part, int64_t token, int64_t head, const std::byte* key,
                  const std::byte* value) {
    PlainMemory::Sequence& of = run_.memory().layer(layer).sequences[part / heads_apart()];
    note_side(of.keys, token, head, key);
    note_side(of.values, token, head, value);
  }

  /// Where a disk may be bad the tail may have been read from records sooner.
  void note_tail(int64_t layer, int64_t part, int64_t first_group) {
    const int64_t begin = first_group * options_.group_tokens, end = engine().positions(layer);
    const int64_t row = options_.head_dim * dtype_bytes(options_.dtype);
    std::vector<std::byte> keys(options_.kv_heads * (end - begin) * row), values(keys.size());
    ASSERT_TRUE(engine()
                    .read_back(layer, part / heads_apart(), begin, end, keys.data(), values.data())
                    .is_ok());
    for (int64_t head = part % heads_apart(); head < options_.kv_heads; head += heads_apart()) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t at = (head * (end - begin) + token - begin) * row;
        note_token(layer, part, token, head, keys.data() + at, values.data() + at);
      }
    }
  }

  /// The same of tokens that wait.
  void note_read_again(int64_t layer, int64_t part) {
    const RecordShape shape = engine().context().options.record_shape();
    for (const int64_t token : row(layer, part).pages.waiting()) {
      const int64_t at = row(layer, part).pages.waiting_at(token);
      const std::byte* page =
          engine().sequences().pages(part).waiting_page(layer, at / shape.group_tokens);
      const TokenBytes held = token_of_page(shape, page, at % shape.group_tokens);
      for (int64_t head = 0; head < shape.kv_heads; ++head) {
        const int64_t of_model = heads_apart() > 1 ? part % heads_apart() : head;
        note_token(layer, part, token, of_model, held.key + head * held.key_head_stride,
                   held.value + head * held.value_head_stride);
      }
    }
  }

  /// What the layer's next attention reads: of tokens that stand in records, what these hold.
  PlainMemory as_read(int64_t layer) {
    const Batch& batch = engine().sequences();
    for (int64_t part = 0; part < parts() && refused_ > 0; ++part) note_read_again(layer, part);
    PlainMemory memory = run_.memory();
    for (int64_t part = 0; part < parts(); ++part) {
      round_tokens(memory, layer, part, 0, batch.layer(layer).sealed_groups, [&](int64_t token) {
        return batch.fits(layer, part) || row(layer, part).pages.place(token) >= 0;
      });
    }
    return memory;
  }

  void note_missed(int64_t layer, const std::vector<float>& query, int64_t queries,
                   const std::vector<std::vector<uint8_t>>& seen, PlainMemory memory) {
    if (options_.audit_every == 0 || engine().sequences().all_fit(layer)) return;
    // Of values that are 1 where a token is seen, attention over all tells the share.
    PlainMemory::Sequence& first = memory.layer(layer).sequences.front();
    for (size_t i = 0; i < first.values.size(); ++i) {
      const auto token = static_cast<int64_t>(i) / memory.width();
      const auto head = static_cast<int64_t>(i) % memory.width() / options_.head_dim;
      first.values[i] = seen[head % heads_apart()][token];
    }
    const auto shares = memory.attend_over(layer, query, queries, 0.125,
                                           [](int64_t, int64_t, int64_t) { return true; });
    const int64_t count = queries * options_.query_heads * options_.head_dim;
    missed_[layer].push_back(1 -
                             std::accumulate(shares.begin(), shares.begin() + count, 0.0) / count);
  }

  /// 1 for what the next attend() attends over, of each part's tokens; 0 for others.
  std::vector<std::vector<uint8_t>> seen_tokens(int64_t layer,
                                                const std::vector<std::vector<int32_t>>& chosen) {
    const int64_t group_tokens = options_.group_tokens;
    const Batch& batch = engine().sequences();
    std::vector<std::vector<uint8_t>> seen(parts());
    for (int64_t part = 0; part < parts(); ++part) {
      const auto& [clusters, pages] = row(layer, part);
      const std::set<int64_t> ids(chosen[part].begin(), chosen[part].end());
      for (int64_t token = 0; token < engine().positions(layer); ++token) {
        const int64_t group = token / group_tokens;
        const bool has_left = token < clusters.left();
        const int32_t place = has_left ? pages.place(token) : -1;
        const bool is_chosen = place >= 0 && ids.contains(page_id(place / group_tokens));
        const bool waits = has_left && pages.waiting_at(token) >= 0;
        seen[part].push_back(group >= batch.layer(layer).sealed_groups ||
                             run_.memory().is_sink(part / heads_apart(), group) ||
                             (batch.fits(layer, part) ? ids.contains(group) : is_chosen || waits));
      }
    }
    return seen;
  }

  /// As the engine asks it, of an engine that has not looked ahead.
  std::vector<std::vector<int32_t>> choice(int64_t layer, const std::vector<float>& query,
                                           int64_t queries) {
    const Batch& batch = engine().sequences();
    std::vector<std::vector<int32_t>> chosen(parts());
    if (!batch.all_fit(layer)) {
      const std::vector<Candidates> candidates(parts());
      engine().context().selector->choose(
          {.layer = layer,
           .query = run_.view(query, queries).of_parts(heads_apart()),
           .groups = batch.layer(layer).sealed_groups,
           .groups_per_query = std::min(options_.groups_max, options_.pages_max / queries),
           .candidates = candidates,
           .chosen = &chosen,
           .scale = 0.125f});
    }
    for (int64_t part = 0; part < parts(); ++part) {
      if (batch.fits(layer, part)) {
        batch.choosable(layer, part, batch.layer(layer).sealed_groups, chosen[part]);
      }
    }
    return chosen;
  }

  EngineOptions options_;
  EngineRun run_;
  int refused_ = 0;
  std::map<int64_t, std::vector<double>> missed_;
};

}  // namespace kvswap
