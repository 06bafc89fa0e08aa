// Saved sessions: the folder, its refusals, and what a kill leaves.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "io/syscalls.h"
#include "kvswap/saved_cache.h"
#include "saved_run.h"

#if KVSWAP_HAS_JSON

namespace kvswap {
namespace {

namespace fs = std::filesystem;

TEST(SavedCache, GoesOnAsTheOneThatWasSaved) {
  const Folder folder;
  Cache session(options_in(folder.path()));
  step(session, 200, 1);
  session.save({.path = folder / "book.kvswap"});
  EXPECT_EQ(folder.names(), std::vector<std::string>{"book.kvswap"});
  const auto saved = SavedCache::open(folder / "book.kvswap");
  EXPECT_EQ(saved->tokens(), 200);
  EXPECT_EQ(saved->sequences(), 1);
  Cache opened(*saved, saved->options(folder.path(), {}));
  EXPECT_EQ(opened.report().counters.at("bytes_read"), 0);
  const auto forked = opened.fork();
  for (uint64_t i = 2; i < 30; ++i) {
    const std::vector<float> expected = step(session, i % 3 + 1, i);
    ASSERT_EQ(step(opened, i % 3 + 1, i), expected);
    ASSERT_EQ(step(*forked, i % 3 + 1, i), expected);
  }
  session.close();
  opened.close();
  EXPECT_EQ(step(*forked, 1, 99).size(), 64);
  saved->verify();
}

TEST(SavedCache, OpensWhatPythonSaved) {
  for (const char* name : {"covering", "choosing"}) {
    const Folder folder;
    fs::copy(fs::path(KVSWAP_SAVED_BY_PYTHON) / name, folder / name);
    const auto saved = SavedCache::open(folder / name);
    saved->verify();
    EXPECT_NE(saved->facts().find("\"model_type\""), std::string::npos);
    Cache session(*saved, saved->options(folder.path(), {}));
    const ModelShape shape = session.options().shape;
    const int64_t positions = saved->tokens();
    for (int64_t layer = 0; layer < shape.layers; ++layer) {
      ASSERT_EQ(session.layer(layer).positions, positions);
      std::vector<float> keys(shape.kv_heads * positions * shape.head_dim), values(keys.size());
      for (int64_t sequence = 0; sequence < saved->sequences(); ++sequence) {
        session.read_back(layer, sequence, positions - 1, positions, keys.data(), values.data());
        session.read_back(layer, sequence, 0, positions, keys.data(), values.data());
        const auto [least, most] = std::minmax_element(keys.begin(), keys.end());
        EXPECT_LT(*least, *most);
      }
    }
    EXPECT_GT(session.report().counters.at("bytes_read"), 0);
  }
}

TEST(SavedCache, KeepsWhatAProgramAddsAndOnlyItsOwnerCanReadIt) {
  const Folder folder;
  Cache session(options_in(folder.path()));
  step(session, 100, 1);
  const std::vector<int64_t> ids = {3, 1, 4};
  const mode_t before = ::umask(0277);
  session.save({.path = folder / "a",
                .facts = R"({"title": "x\u0000y", "n": 1.5})",
                .tensors = {{"ids", "I64", {3}, std::as_bytes(std::span(ids))}}});
  ::umask(before);
  const auto saved = SavedCache::open(folder / "a");
  EXPECT_NE(saved->facts().find("\"n\":1.5"), std::string::npos);
  ASSERT_EQ(saved->tensors().count("ids"), 1);
  EXPECT_EQ(std::memcmp(saved->tensors().at("ids").bytes.data(), ids.data(), 24), 0);
  struct stat facts{};
  ASSERT_EQ(::stat((folder / "a").c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0700);
  for (const auto& entry : fs::directory_iterator(folder / "a")) {
    ASSERT_EQ(::stat(entry.path().c_str(), &facts), 0);
    EXPECT_EQ(facts.st_mode & 0777, 0600) << entry.path();
  }
}

TEST(SavedCache, ATargetThatIsThereInUseOrNoneIsRefused) {
  const Folder folder;
  Cache session(options_in(folder.path()));
  const auto save = [&](const std::string& path, bool overwrite) {
    return message_of([&] { session.save({.path = path, .overwrite = overwrite}); });
  };
  EXPECT_NE(save(folder / "a", false).find("is empty"), std::string::npos);
  step(session, 100, 1);
  EXPECT_EQ(save(folder / "a", false), "");
  step(session, 60, 2);
  EXPECT_NE(save(folder / "a", false).find("must not exist"), std::string::npos);
  EXPECT_EQ(save(folder / "a", true), "") << "who saved it is not somebody else";
  {
    const auto saved = SavedCache::open(folder / "a");
    Cache reader(*saved, saved->options(folder.path(), {}));
    EXPECT_NE(save(folder / "a", true).find("is open"), std::string::npos);
    EXPECT_NE(message_of([&] { SavedCache::remove(folder / "a"); }).find("is open"),
              std::string::npos);
  }
  fs::create_directory(folder / "other");
  EXPECT_NE(save(folder / "other", true).find("no manifest.json"), std::string::npos);
  EXPECT_NE(save(folder / "no/where", false).find("parent folder must exist"), std::string::npos);
  EXPECT_NE(save(std::string("a\0b", 3), false).find("without NUL"), std::string::npos);
  session.close();
  {
    Cache other(options_in(folder.path()));
    step(other, 40, 3);
    other.save({.path = folder / "a", .overwrite = true});
  }
  EXPECT_EQ(SavedCache::open(folder / "a")->tokens(), 40);
  SavedCache::remove(folder / "a");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"other"});
}

TEST(SavedCache, EveryDamageHasItsSentenceAndLeavesNothing) {
  const Folder folder;
  const std::string path = folder / "book";
  {
    Cache session(options_in(folder.path()));
    step(session, 200, 1);
    session.save({.path = path});
  }
  const std::string kept = folder / "kept";
  fs::copy(path, kept, fs::copy_options::recursive);
  const auto opened = [&] {
    return message_of([&] {
      const auto saved = SavedCache::open(path);
      Cache session(*saved, saved->options(folder.path(), {}));
    });
  };
  ASSERT_EQ(opened(), "");
  struct Damage {
    const char* what;
    std::function<void()> make;
    const char* sentence;
  };
  const auto flip = [&](const char* file, int64_t at) {
    std::fstream bytes(path + "/" + file, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekg(at);
    const char one = static_cast<char>(bytes.get() ^ 4);
    bytes.seekp(at);
    bytes.put(one);
  };
  const auto cut = [&](const char* file) {
    fs::resize_file(path + "/" + file, fs::file_size(path + "/" + file) / 2);
  };
  const auto link = [&](const char* file) {
    fs::remove(path + "/" + file);
    fs::create_symlink(kept + "/" + file, path + "/" + file);
  };
  const auto newer = [&] {
    std::ifstream file(path + "/manifest.json");
    std::string text((std::istreambuf_iterator<char>(file)), {});
    text.replace(text.find("\"kvswap_cache\": 2"), 17, "\"kvswap_cache\": 6");
    std::ofstream(path + "/manifest.json") << text;
  };
  const Damage damages[] = {
      {"no folder", [&] { fs::remove_all(path); }, "must be the folder of a saved cache"},
      {"no manifest", [&] { fs::remove(path + "/manifest.json"); }, "manifest.json must be there"},
      {"no state", [&] { fs::remove(path + "/state.safetensors"); }, "must be there"},
      {"no records", [&] { fs::remove(path + "/records.bin"); }, "records.bin must be there"},
      {"short manifest", [&] { cut("manifest.json"); }, "must be JSON"},
      {"short state", [&] { cut("state.safetensors"); }, "state.safetensors is damaged"},
      {"short records", [&] { cut("records.bin"); }, "records.bin is damaged"},
      {"bit in manifest", [&] { flip("manifest.json", 300); }, "manifest.json is damaged"},
      {"bit in state", [&] { flip("state.safetensors", 5000); }, "checksum"},
      {"link for records", [&] { link("records.bin"); }, "is a link"},
      {"link for manifest", [&] { link("manifest.json"); }, "is a link"},
      {"newer", newer, "must be of version 5 or lower"},
  };
  for (const Damage& damage : damages) {
    SCOPED_TRACE(damage.what);
    fs::remove_all(path);
    fs::copy(kept, path, fs::copy_options::recursive);
    damage.make();
    const std::string said = opened();
    EXPECT_NE(said.find(damage.sentence), std::string::npos) << said;
    EXPECT_NE(said.find("book"), std::string::npos) << said;
  }
  fs::remove_all(path);
  fs::copy(kept, path, fs::copy_options::recursive);
  flip("records.bin", 3000);
  EXPECT_EQ(opened(), "");
  EXPECT_NE(message_of([&] { SavedCache::open(path)->verify(); }).find("checksum"),
            std::string::npos);
  const Folder elsewhere;
  const auto damaged = SavedCache::open(path);
  Cache session(*damaged, damaged->options(elsewhere.path(), {}));
  std::vector<float> keys(2 * 200 * 16), values(keys.size());
  const std::string said =
      message_of([&] { session.read_back(0, 0, 0, 200, keys.data(), values.data()); });
  EXPECT_NE(said.find("from the file in " + path + " at offset"), std::string::npos) << said;
  EXPECT_EQ(folder.names().size(), 2);
}

TEST(SavedCache, LittleMemoryKeepsFewerPagesOrNamesTheLeast) {
  const Folder folder;
  CacheOptions options = options_in(folder.path());
  options.settings.groups_max = 200;
  options.settings.pages_max = 20000;
  Cache session(options);
  step(session, 400, 1);
  session.save({.path = folder / "a"});
  const auto saved = SavedCache::open(folder / "a");
  const int64_t whole = memory_need(saved->options(folder.path(), {}), 1, 400).at("total");
  Budget budget;
  budget.kv_memory_bytes = whole / 2;
  const CacheOptions less = saved->options(folder.path(), budget);
  EXPECT_LT(less.settings.pages_max, 20000);
  EXPECT_GE(less.settings.pages_max, 200);
  Cache opened(*saved, less);
  EXPECT_LE(opened.report().ledger.at("peak"), whole / 2);
  budget.kv_memory_bytes = 1000;
  const std::string said = message_of([&] { saved->options(folder.path(), budget); });
  const std::string before = "kv_memory_bytes: must be at least ";
  ASSERT_EQ(said.find(before), 0) << said;
  const int64_t least = std::stoll(said.substr(before.size()));
  budget.kv_memory_bytes = least - 1;
  EXPECT_NE(message_of([&] { saved->options(folder.path(), budget); }), "");
  budget.kv_memory_bytes = least;
  Cache smallest(*saved, saved->options(folder.path(), budget));
  EXPECT_LE(smallest.report().ledger.at("peak"), least);
}

/// Ends the process at the n-th call that changes the file system.
class DeadlyKernel final : public Syscalls {
 public:
  explicit DeadlyKernel(int calls) : left_(calls) {}
  int fsync(int fd) override { return tick(), Syscalls::fsync(fd); }
  int name_file(int fd, int folder, const char* name) override {
    return tick(), Syscalls::name_file(fd, folder, name);
  }
  int rename(int folder, const char* from, const char* to, unsigned flags) override {
    return tick(), Syscalls::rename(folder, from, to, flags);
  }
  int make_folder(int parent, const char* name, mode_t mode) override {
    return tick(), Syscalls::make_folder(parent, name, mode);
  }
  int open_at(int folder, const char* name, int flags, mode_t mode) override {
    return tick(), Syscalls::open_at(folder, name, flags, mode);
  }
  int64_t pwrite(int fd, const void* data, size_t bytes, int64_t offset_bytes) override {
    return tick(), Syscalls::pwrite(fd, data, bytes, offset_bytes);
  }

 private:
  void tick() {
    if (left_-- == 0) ::raise(SIGKILL);
  }
  int left_;
};

TEST(SavedCache, AKillAtAnyStepLeavesAllOrNothingAndTheNextSaveClearsUp) {
  const Folder folder;
  const std::string path = folder / "book";
  bool was_whole = false;
  int kills = 0;
  for (int calls = 0; !was_whole; ++calls) {
    ASSERT_LT(calls, 100);
    for (const bool overwrite : {false, true}) {
      SCOPED_TRACE(testing::Message() << calls << " " << overwrite);
      fs::remove_all(path);
      const int64_t before = overwrite ? 40 : 0;
      if (overwrite) {
        Cache old(options_in(folder.path()));
        step(old, 40, 1);
        old.save({.path = path});
      }
      const pid_t child = ::fork();
      if (child == 0) {
        Cache session(options_in(folder.path()));
        step(session, 100, 2);
        DeadlyKernel deadly(calls);
        use_syscalls(&deadly);
        session.save({.path = path, .overwrite = overwrite});
        use_syscalls(nullptr);
        ::_exit(0);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      was_whole = WIFEXITED(status);
      kills += was_whole ? 0 : 1;
      const bool is_there = fs::exists(path);
      if (is_there) {
        const auto saved = SavedCache::open(path);
        EXPECT_TRUE(saved->tokens() == before || saved->tokens() == 100);
        saved->verify();
      }
      EXPECT_TRUE(is_there || before == 0);
      EXPECT_LE(folder.names().size(), is_there ? 2u : 1u);
    }
  }
  EXPECT_GT(kills, 10);
  Cache session(options_in(folder.path()));
  step(session, 50, 3);
  session.save({.path = path, .overwrite = true});
  EXPECT_EQ(folder.names(), std::vector<std::string>{"book"});
}

/// Fails the n-th call of a kind, once. Writes of the session's own file, tried again, are let be.
class FullKernel final : public Syscalls {
 public:
  explicit FullKernel(int calls) : left_(calls) {}
  int open_at(int folder, const char* name, int flags, mode_t mode) override {
    return made_ = Syscalls::open_at(folder, name, flags, mode);
  }
  int64_t pwrite(int fd, const void* data, size_t bytes, int64_t offset_bytes) override {
    return fd == made_ && fails() ? -ENOSPC : Syscalls::pwrite(fd, data, bytes, offset_bytes);
  }
  int fsync(int fd) override { return fails() ? -EIO : Syscalls::fsync(fd); }
  int name_file(int, int, const char*) override { return -EXDEV; }
  bool has_failed() const { return left_ < 0; }

 private:
  bool fails() { return left_-- == 0; }
  int left_;
  std::atomic<int> made_ = -1;  // the newest file of the folder
};

TEST(SavedCache, ADiskThatIsFullOrFailsLeavesNothingAndTheSessionGoesOn) {
  const Folder folder;
  Cache session(options_in(folder.path()));
  Cache twin(options_in(folder.path()));
  step(session, 100, 1);
  step(twin, 100, 1);
  bool failed = true;
  for (int calls = 0; failed; ++calls) {
    ASSERT_LT(calls, 100);
    FullKernel full(calls);
    use_syscalls(&full);
    const std::string said = message_of([&] { session.save({.path = folder / "book"}); });
    use_syscalls(nullptr);
    failed = full.has_failed();
    EXPECT_EQ(failed, !said.empty()) << said;
    EXPECT_EQ(folder.names().size(), failed ? 0u : 1u);
    ASSERT_EQ(step(session, 2, 10 + calls), step(twin, 2, 10 + calls));
  }
  SavedCache::open(folder / "book")->verify();
}

TEST(SavedCache, ManyMayOpenItAtOnce) {
  const Folder folder;
  {
    Cache session(options_in(folder.path()));
    step(session, 200, 1);
    session.save({.path = folder / "a"});
  }
  std::vector<pid_t> children;
  for (int i = 0; i < 3; ++i) {
    children.push_back(::fork());
    if (children.back() == 0) {
      const auto saved = SavedCache::open(folder / "a");
      Cache session(*saved, saved->options(folder.path(), {}));
      for (uint64_t seed = 0; seed < 20; ++seed) step(session, 5, seed);
      ::_exit(session.layer(0).positions == 300 ? 0 : 1);
    }
  }
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  SavedCache::remove(folder / "a");
}

}  // namespace
}  // namespace kvswap

#endif
