// The public torch-free session against plain attention over everything.

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <random>

#include "kernels/cpu/element.h"
#include "kvswap/core_session.h"

namespace kvswap {
namespace {

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

CoreOptions covering(const std::string& directory, ElementType dtype = ElementType::kFloat32) {
  CoreOptions options;
  options.shape = {.layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 16, .dtype = dtype};
  options.settings.rank = 8;
  options.settings.groups_max = 60;
  options.settings.pages_max = 60;
  options.settings.tail_tokens = 8;
  options.directory = directory;
  return options;
}

/// Drives one layer and keeps all it was given, for attention written down plainly.
class Plain {
 public:
  Plain(const CoreOptions& options, int64_t batch) : shape_(options.shape), batch_(batch) {}

  /// Appends random tokens to all layers, attends, and compares the last layer's answer.
  void step(CoreSession& session, int64_t tokens, double tolerance) {
    const int64_t kv_count = batch_ * shape_.kv_heads * tokens * shape_.head_dim;
    const auto keys = random(kv_count);
    const auto values = random(kv_count);
    const auto query = random(batch_ * shape_.heads * tokens * shape_.head_dim);
    const auto k = stored(keys), v = stored(values), q = stored(query);
    std::vector<std::byte> output(q.size());
    const NewTokens added = NewTokens::packed(k.data(), v.data(), shape_, batch_, tokens);
    for (int64_t layer = 0; layer < shape_.layers; ++layer) {
      session.append(layer, added);
      session.attend(layer, Queries::packed(q.data(), shape_.heads, tokens, shape_.head_dim), 0.25f,
                     output.data(),
                     {.softcap = softcap, .sinks = sinks.empty() ? nullptr : sinks.data()});
    }
    keep(keys, values, tokens);
    for (int64_t b = 0; b < batch_; ++b) compare(output, query, b, tokens, tolerance);
  }

  void pad(int64_t sequence, int64_t columns) { padding_[sequence] = columns; }

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
    columns_ += tokens;
  }

  const float* entry(const std::vector<float>& all, int64_t column, int64_t b, int64_t head) const {
    return &all[((column * batch_ + b) * shape_.kv_heads + head) * shape_.head_dim];
  }

  void compare(const std::vector<std::byte>& output, const std::vector<float>& query, int64_t b,
               int64_t tokens, double tolerance) const {
    const int64_t dim = shape_.head_dim;
    for (int64_t h = 0; h < shape_.heads; ++h) {
      const int64_t kv = h / (shape_.heads / shape_.kv_heads);
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t end = columns_ - tokens + t + 1;
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
  std::vector<float> keys_;  // [columns, batch, kv_heads, head_dim]
  std::vector<float> values_;
  int64_t columns_ = 0;
  int64_t padding_[4] = {};
};

void run_chunks(CoreSession& session, Plain& plain, double tolerance) {
  // Longer chunks are exact; the last ones decode. One is no multiple of the groups.
  for (const int64_t tokens : {37, 50, 1, 3, 40, 1, 1}) plain.step(session, tokens, tolerance);
}

TEST(CoreSession, AttendsOverEverythingWhereSettingsCoverIt) {
  const Folder folder;
  CoreSession session(covering(folder.path()));
  Plain plain(session.options(), 2);
  run_chunks(session, plain, 1e-5);
  EXPECT_EQ(session.columns(1), 133);
  EXPECT_EQ(session.batch(), 2);
  EXPECT_GT(session.counters().at("records_sealed"), 0);
  EXPECT_EQ(session.facts().count("reader"), 1u);
  EXPECT_GT(session.ledger().at("total"), 0);
}

TEST(CoreSession, HeadsThatChooseApartAttendOverTheSame) {
  for (const int64_t batch : {1, 3}) {
    const Folder folder;
    CoreOptions options = covering(folder.path());
    options.settings.heads = "each";
    options.settings.group_tokens = 16;  // a head's record of 2 KiB
    CoreSession session(options);
    Plain plain(options, batch);
    for (const int64_t tokens : {37, 1, 3, 20, 1, 40, 1}) plain.step(session, tokens, 1e-4);
    EXPECT_EQ(session.batch(), batch);
  }
}

TEST(CoreSession, LayersThatNeverChooseRestoreWhatTheirPagesDoNotHold) {
  for (const char* heads : {"all", "each"}) {
    for (const bool all_layers : {false, true}) {
      const Folder folder;
      CoreOptions options = covering(folder.path());
      options.settings.rows = all_layers ? "none" : "box";
      options.settings.rank = 32;  // what rows without a rank leave it at
      options.settings.exact_layers = {0, 1};
      options.settings.heads = heads;
      options.settings.io_mode = "buffered";
      options.settings.groups_max = 8;
      options.settings.pages_max = 8;
      CoreSession session(options);
      Plain plain(options, 2);
      plain.softcap = 0.5f;
      plain.sinks = {0.5f, -1.0f, 2.0f, 0.0f};
      plain.pad(1, 11);
      bool valid[2 * 37];
      for (int64_t i = 0; i < 2 * 37; ++i) valid[i] = i < 37 || i >= 37 + 11;
      session.declare(2, 37, valid);
      // The first chunks fit into eight groups of four tokens and the tail of eight.
      for (const int64_t tokens : {37, 1, 3, 1, 40, 1, 3, 1}) plain.step(session, tokens, 1e-5);
      EXPECT_EQ(session.ledger().at("summary"), 0);
      EXPECT_GT(session.counters().at("groups_loaded"), 0);
      EXPECT_FALSE(session.needs_projection(0));
    }
  }
}

TEST(CoreSession, CapsScoresAndHasSinksBesideThem) {
  for (const bool apart : {false, true}) {
    const Folder folder;
    CoreOptions options = covering(folder.path());
    if (apart) options.settings.heads = "each";
    options.settings.group_tokens = 16;
    CoreSession session(options);
    Plain plain(options, 2);
    plain.softcap = 0.5f;
    plain.sinks = {0.5f, -1.0f, 2.0f, 0.0f};
    for (const int64_t tokens : {37, 1, 3, 20, 1}) plain.step(session, tokens, 1e-5);
  }
}

TEST(CoreSession, TellsWhereItsTimeWent) {
  const Folder folder;
  CoreOptions options = covering(folder.path());
  options.timeline_spans = 4096;
  CoreSession session(options);
  Plain plain(session.options(), 2);
  run_chunks(session, plain, 1e-5);
  const std::string trace = session.timeline();
  for (const char* kind : {"select", "attend", "attend exactly", "append", "seal", "read"}) {
    EXPECT_NE(trace.find("\"name\":\"" + std::string(kind)), std::string::npos) << kind;
  }
  EXPECT_EQ(session.ledger().at("timeline"), 4096 * 40);
  EXPECT_EQ(CoreSession::memory_need(options, 2, 200).at("timeline"), 4096 * 40);
  options.timeline_spans = 0;
  const CoreSession silent(options);
  EXPECT_THROW(silent.timeline(), std::invalid_argument);
}

TEST(CoreSession, RoundsOnceInBfloat16) {
  const Folder folder;
  CoreSession session(covering(folder.path(), ElementType::kBFloat16));
  Plain plain(session.options(), 1);
  run_chunks(session, plain, 2e-2);
}

TEST(CoreSession, LeavesPaddingOut) {
  const Folder folder;
  CoreSession session(covering(folder.path()));
  Plain plain(session.options(), 2);
  plain.pad(1, 11);
  bool valid[2 * 37];
  for (int64_t i = 0; i < 2 * 37; ++i) valid[i] = i < 37 || i >= 37 + 11;
  session.declare(2, 37, valid);
  run_chunks(session, plain, 1e-5);
}

TEST(CoreSession, ThreadsDoNotChangeTheAnswer) {
  const Folder folder;
  CoreOptions options = covering(folder.path());
  options.threads = [](int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) {
    for (int64_t i = count - 1; i >= 0; --i) body(i, i + 1);
  };
  CoreSession session(options);
  Plain plain(options, 1);
  run_chunks(session, plain, 1e-5);
}

TEST(CoreSession, ReadsBackWhatItWasGiven) {
  const Folder folder;
  CoreSession session(covering(folder.path()));
  const ModelShape shape = session.options().shape;
  std::vector<float> keys(2 * 60 * 16), values(2 * 60 * 16);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i, values[i] = -1.0f * i;
  session.append(0, NewTokens::packed(keys.data(), values.data(), shape, 1, 60));
  std::vector<float> got(2 * 50 * 16), other(2 * 50 * 16);
  session.read_back(0, 0, 10, 60, got.data(), other.data());
  EXPECT_EQ(got[0], keys[10 * 16]);
  EXPECT_EQ(other[50 * 16 + 3], values[(60 + 10) * 16 + 3]);
  session.append(1, NewTokens::packed(keys.data(), values.data(), shape, 1, 60));
  session.crop(20);
  EXPECT_EQ(session.columns(0), 20);
}

TEST(CoreSession, SelectsWithAProjectionAndLooksAhead) {
  const Folder folder;
  CoreOptions options = covering(folder.path());
  options.settings.groups_max = 3;
  options.settings.pages_max = 8;
  CoreSession session(options);
  std::vector<float> keys(2 * 100 * 16, 0.5f);
  const auto query = Queries::packed(keys.data(), 4, 1, 16);
  std::vector<float> output(4 * 16);
  const auto tokens = NewTokens::packed(keys.data(), keys.data(), options.shape, 1, 100);
  session.append(0, tokens);
  EXPECT_TRUE(session.needs_projection(0));
  EXPECT_THROW(session.attend(0, query, 1, output.data()), std::invalid_argument);
  Projection projection = {32, 8, std::vector<float>(32 * 8, 0.1f), std::vector<float>(32 * 8, 1)};
  session.set_projection(0, projection);
  session.look_ahead(0, Queries::packed(keys.data(), 2, 1, 16));
  EXPECT_EQ(session.last_selection(0)[0].size(), 3u);
  session.append(0, NewTokens::packed(keys.data(), keys.data(), options.shape, 1, 1));
  session.attend(0, query, 1, output.data());
  for (const float value : output) EXPECT_NEAR(value, 0.5f, 1e-6);
  projection.keys.pop_back();
  EXPECT_THROW(session.set_projection(0, projection), std::invalid_argument);
}

template <typename Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(CoreSession, RefusesWrongCalls) {
  const Folder folder;
  CoreOptions options = covering(folder.path());
  CoreSession session(options);
  std::vector<float> data(4 * 16);
  EXPECT_NE(refusal([&] { session.columns(2); }).find("layer must be 0..1, got 2"), -1ul);
  EXPECT_NE(refusal([&] {
              session.attend(0, Queries::packed(data.data(), 3, 1, 16), 1, data.data());
            }).find("query must have 4 heads, got 3"),
            -1ul);
  EXPECT_NE(refusal([&] { session.append(0, {}); }).find("append: must have keys"), -1ul);
  EXPECT_NE(refusal([&] {
              session.attend(0, Queries::packed(data.data(), 4, 20, 16), 1, data.data());
            }).find("attend: query must be of the 0 columns"),
            -1ul);
  session.close();
  session.close();
  EXPECT_THROW(session.batch(), SessionError);
  options.settings.io_mode = "mmap";
  EXPECT_THROW(CoreSession{options}, std::invalid_argument);
}

TEST(CoreSession, TellsWhatTheWorldAndLimitsRefuse) {
  CoreOptions options = covering("/no/such/folder");
  try {
    CoreSession session(options);
    FAIL();
  } catch (const SessionError& error) {
    EXPECT_EQ(error.kind(), SessionError::Kind::kStorage);
    EXPECT_EQ(error.error_number(), ENOENT);
  }
  const Folder folder;
  options.directory = folder.path();
  options.budget = {.kv_memory_bytes = 1 << 20, .max_context = 100'000, .max_batch = 8};
  try {
    CoreSession session(options);
    FAIL();
  } catch (const SessionError& error) {
    EXPECT_EQ(error.kind(), SessionError::Kind::kBudget);
  }
  const auto need = CoreSession::memory_need(options, 8, 100'000, 4096);
  EXPECT_GT(need.at("total"), 1 << 20);
  EXPECT_EQ(need.at("record_bytes"), 4096);
}

}  // namespace
}  // namespace kvswap
