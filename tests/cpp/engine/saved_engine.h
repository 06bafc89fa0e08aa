#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "io/read_only_file.h"
#include "io/syscalls.h"

namespace kvswap {

/// A saved engine whose tensors stand in memory, and its records in a file.
class SavedInMemory final : public SnapshotTarget, public SavedTensors {
 public:
  explicit SavedInMemory(std::string directory, bool may_link = true)
      : directory_(std::move(directory)), may_link_(may_link) {}
  ~SavedInMemory() override { (void)::unlink(path().c_str()); }

  std::string path() const { return directory_ + "/records.bin"; }
  bool is_linked() const { return is_linked_; }
  const SavedCounts& counts() const { return counts_; }
  std::map<std::string, std::vector<std::byte>>& tensors() { return tensors_; }

  Result<bool> link_records(int fd) override {
    if (!may_link_) return false;
    const int folder = ::open(directory_.c_str(), O_RDONLY | O_DIRECTORY);
    const int named = syscalls().name_file(fd, folder, "records.bin");
    ::close(folder);
    is_linked_ = named == 0;
    return is_linked_;
  }
  Status write_records(std::span<const std::byte> records) override {
    const int fd = ::open(path().c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    EXPECT_EQ(::write(fd, records.data(), records.size()), static_cast<ssize_t>(records.size()));
    ::close(fd);
    return Status::ok();
  }
  Status finish(const SavedCounts& counts, std::span<const SavedTensor> tensors) override {
    counts_ = counts;
    for (const SavedTensor& tensor : tensors) {
      EXPECT_EQ(tensors_.count(tensor.name), 0) << tensor.name;
      std::vector<std::byte>& bytes = tensors_[tensor.name];
      bytes.resize(tensor.bytes());
      for (int64_t row = 0; row < tensor.shape[0]; ++row) {
        KVSWAP_RETURN_IF_ERROR(tensor.read(row, 1, bytes.data() + row * tensor.row_bytes));
      }
      facts_[tensor.name] = {tensor.dtype, tensor.shape};
    }
    return Status::ok();
  }

  bool has(const std::string& name) const override { return tensors_.contains(name); }
  Result<SavedBytes> get(const std::string& name, const std::string& dtype,
                         std::span<const int64_t> shape) const override {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) return refuse(name, "be there");
    const auto& [known_dtype, known_shape] = facts_.at(name);
    if (known_dtype != dtype || !std::ranges::equal(known_shape, shape)) {
      return refuse(name, "have another shape");
    }
    return SavedBytes(found->second, nullptr);
  }
  Status refuse(const std::string& name, const std::string& must) const override {
    return Status::corrupt("state: " + name + " must " + must, directory_);
  }

  /// An engine that goes on from what was saved.
  Result<std::unique_ptr<Engine>> open(EngineOptions options) const {
    auto base = std::make_shared<ParentFiles>();
    const int fd = ::open(path().c_str(), O_RDONLY | O_CLOEXEC | O_CREAT, 0600);
    base->end_bytes = ::lseek(fd, 0, SEEK_END);
    base->record_bytes = counts_.record_bytes;
    base->parts.push_back({make_read_only_file(OwnedFd(fd), {.directory = directory_,
                                                             .wants_direct = true,
                                                             .unit_bytes = counts_.record_bytes}),
                           0});
    base->seeds = {{0, counts_.seed}};
    base->groups = counts_.groups;
    options.base = base;
    auto engine = Engine::create(options, nullptr);
    if (!engine.is_ok()) return engine;
    KVSWAP_RETURN_IF_ERROR(engine.value()->loader().load(counts_, *this));
    return engine;
  }

 private:
  std::string directory_;
  bool may_link_;
  bool is_linked_ = false;
  SavedCounts counts_;
  std::map<std::string, std::vector<std::byte>> tensors_;
  std::map<std::string, std::pair<std::string, std::vector<int64_t>>> facts_;
};

/// As the public sessions do; its tensors may go when it is there.
inline std::unique_ptr<Engine> fork_of(Engine& engine) {
  auto shared = engine.saver().share();
  EXPECT_TRUE(shared.is_ok()) << shared.status().message();
  SavedInMemory tensors(engine.options().directory);
  EXPECT_TRUE(tensors.finish(shared.value().counts, shared.value().tensors).is_ok());
  EngineOptions options = engine.options();
  options.base = shared.value().base;
  auto fork = Engine::create(options, nullptr);
  EXPECT_TRUE(fork.is_ok()) << fork.status().message();
  const Status loaded =
      fork.value()->loader().load(shared.value().counts, tensors, shared.value().summaries);
  EXPECT_TRUE(loaded.is_ok()) << loaded.message();
  return std::move(fork.value());
}

/// What a few passes of drawn tokens answer; the same for engines that hold the same.
inline std::vector<std::byte> answers(Engine& engine, uint64_t seed) {
  const EngineOptions& options = engine.options();
  std::mt19937_64 random(seed);
  std::vector<std::byte> all;
  for (int64_t pass = 0; pass < 12; ++pass) {
    const int64_t tokens = pass == 5 ? 30 : 1 + pass % options.select_queries_max;
    const bool is_short = tokens <= options.select_queries_max;
    EXPECT_TRUE(engine.begin_pass(is_short ? Pass::kDecode : Pass::kPrefill).is_ok());
    const int64_t dim = options.head_dim, value_dim = options.record_shape().value_width();
    const auto draw = [&](int64_t heads, int64_t width) {
      std::normal_distribution<float> normal;
      std::vector<float> numbers(heads * tokens * width);
      for (float& number : numbers) number = normal(random);
      return numbers;
    };
    for (int64_t layer = 0; layer < options.layers; ++layer) {
      const auto keys = draw(options.kv_heads, dim), values = draw(options.kv_heads, value_dim);
      const auto query = draw(options.query_heads, dim);
      const KeyValueView added = {.keys = keys.data(),
                                  .values = values.data(),
                                  .key_batch_stride = 0,
                                  .key_head_stride = tokens * dim,
                                  .key_token_stride = dim,
                                  .value_batch_stride = 0,
                                  .value_head_stride = tokens * value_dim,
                                  .value_token_stride = value_dim,
                                  .batch = 1,
                                  .tokens = tokens};
      EXPECT_TRUE(engine.append(layer, added).is_ok());
      if (!is_short) continue;
      std::vector<std::byte> output(query.size() * sizeof(float));
      const QueryView asked = {.data = query.data(),
                               .head_stride = tokens * dim,
                               .query_stride = dim,
                               .heads = options.query_heads,
                               .queries = tokens};
      const Status attended =
          engine.attend({.layer = layer, .query = asked, .output = output.data(), .scale = 0.125f});
      EXPECT_TRUE(attended.is_ok()) << attended.message();
      all.insert(all.end(), output.begin(), output.end());
    }
  }
  return all;
}

}  // namespace kvswap
