// The power goes at any step of a save: what a disk may hold then is put in a folder and opened.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "io/syscalls.h"
#include "kvswap/saved_cache.h"
#include "saved_run.h"

#if KVSWAP_HAS_JSON

namespace kvswap {
namespace {

namespace fs = std::filesystem;

std::string content_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream all;
  all << file.rdbuf();
  return all.str();
}

ino_t inode_of(const std::string& path) {
  struct stat facts{};
  return ::stat(path.c_str(), &facts) == 0 ? facts.st_ino : 0;
}

using Entries = std::map<std::string, ino_t>;

/// Files by inode, and the names in folders: a folder of saved caches.
struct Disk {
  std::map<ino_t, std::string> files;
  std::map<ino_t, Entries> folders;

  /// A folder and all in it, as they are now.
  void take(const std::string& path) {
    Entries& entries = folders[inode_of(path)] = {};
    for (const auto& entry : fs::directory_iterator(path)) {
      entries[entry.path().filename()] = inode_of(entry.path());
      if (entry.is_directory()) {
        take(entry.path());
      } else {
        files[inode_of(entry.path())] = content_of(entry.path());
      }
    }
  }
};

/// What is on the disk for certain, and what a process sees, after a step of a save.
struct Moment {
  Disk synced;
  Disk now;
};

/// Linux, and a list of the moments between the calls that change or sync files. A sync that is
/// `lost` says that it was done.
class WatchedKernel final : public Syscalls {
 public:
  WatchedKernel(std::string folder, int lost) : folder_(std::move(folder)), lost_(lost) {
    synced_.take(folder_);
    note();
  }
  int fsync(int fd) override {
    const int result = Syscalls::fsync(fd);
    const std::lock_guard lock(mutex_);
    if (result == 0 && lost_-- != 0) {
      const std::string path = "/proc/self/fd/" + std::to_string(fd);
      const ino_t inode = inode_of(path);
      if (fs::is_directory(path)) {
        Disk now;
        now.take(fs::read_symlink(path));
        synced_.folders[inode] = now.folders[inode];
      } else {
        synced_.files[inode] = content_of(path);
      }
    }
    note();
    return result;
  }
  int name_file(int fd, int folder, const char* name) override {
    return noted(Syscalls::name_file(fd, folder, name));
  }
  int rename(int folder, const char* from, const char* to, unsigned flags) override {
    return noted(Syscalls::rename(folder, from, to, flags));
  }
  int make_folder(int parent, const char* name, mode_t mode) override {
    return noted(Syscalls::make_folder(parent, name, mode));
  }
  int open_at(int folder, const char* name, int flags, mode_t mode) override {
    return noted(Syscalls::open_at(folder, name, flags, mode));
  }
  int ftruncate(int fd, int64_t size_bytes) override {
    return noted(Syscalls::ftruncate(fd, size_bytes));
  }
  int64_t pwrite(int fd, const void* data, size_t bytes, int64_t offset_bytes) override {
    return noted(Syscalls::pwrite(fd, data, bytes, offset_bytes));
  }

  std::vector<Moment> moments;

 private:
  template <class Result>
  Result noted(Result result) {
    const std::lock_guard lock(mutex_);
    note();
    return result;
  }
  void note() {
    Moment moment = {synced_, {}};
    moment.now.take(folder_);
    moments.push_back(std::move(moment));
  }

  std::mutex mutex_;  // the session's own file is written by a thread
  std::string folder_;
  int lost_;
  Disk synced_;
};

using Files = std::map<std::string, std::string>;  // of a saved cache, by name

/// What a moment may leave under a name; an empty map: nothing. Of what is not synced, each file
/// has its old bytes, none, a part, zeros or all, and each folder any of its new names.
std::set<Files> left_by(const Moment& moment, ino_t folder, const std::string& name) {
  const auto folders = [&](ino_t inode) {
    const auto known = moment.synced.folders.find(inode);
    const Entries synced = known == moment.synced.folders.end() ? Entries{} : known->second;
    const auto seen = moment.now.folders.find(inode);
    const Entries now = seen == moment.now.folders.end() ? synced : seen->second;
    std::set<Entries> all = {synced, now};
    for (const auto& [entry, of] : now) {
      if (synced.contains(entry)) continue;
      for (Entries some : std::set<Entries>(all)) {
        some[entry] = of;
        all.insert(some);
      }
    }
    return all;
  };
  const auto contents = [&](ino_t inode) -> std::set<std::string> {
    const auto seen = moment.now.files.find(inode);
    const auto known = moment.synced.files.find(inode);
    if (seen == moment.now.files.end()) return {known->second};
    const std::string& now = seen->second;
    if (known != moment.synced.files.end() && known->second == now) return {now};
    return {known == moment.synced.files.end() ? "" : known->second, now,
            now.substr(0, now.size() / 2), std::string(now.size(), '\0')};
  };
  std::set<Files> left;
  for (const Entries& entries : folders(folder)) {
    if (!entries.contains(name)) {
      left.insert(Files{});
      continue;
    }
    for (const Entries& files : folders(entries.at(name))) {
      std::set<Files> some = {{{"", ""}}};  // a folder, though nothing may be in it
      for (const auto& [file, inode] : files) {
        std::set<Files> more;
        for (const std::string& bytes : contents(inode)) {
          for (Files with : some) {
            with[file] = bytes;
            more.insert(std::move(with));
          }
        }
        some = std::move(more);
      }
      left.merge(some);
    }
  }
  return left;
}

enum class Outcome { kAbsent, kRefused, kOld, kNew, kWrong };

constexpr int64_t kOldTokens = 40;
constexpr int64_t kNewTokens = 60;

/// What the next steps of a session of so many tokens answer.
std::vector<float> next_of(Cache& session) { return step(session, 30, 9); }

class PowerLoss : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    fs::create_directory(disk());
    for (const int64_t tokens : {kOldTokens, kNewTokens}) {
      Cache session(options_in(folder_.path()));
      step(session, tokens, tokens);
      expected_[tokens] = next_of(session);
    }
  }
  std::string disk() const { return folder_ / "disk"; }
  std::string saved() const { return disk() + "/book"; }

  /// Saves the new one, and the power goes after each step of it.
  std::vector<Moment> moments(int lost) {
    fs::remove_all(disk());
    fs::create_directory(disk());
    if (GetParam()) {
      Cache old(options_in(folder_.path()));
      step(old, kOldTokens, kOldTokens);
      old.save({.path = saved()});
    }
    Cache session(options_in(folder_.path()));
    step(session, kNewTokens, kNewTokens);
    WatchedKernel watched(disk(), lost);
    use_syscalls(&watched);
    session.save({.path = saved(), .overwrite = GetParam()});
    use_syscalls(nullptr);
    return std::move(watched.moments);
  }

  /// What somebody finds who opens it after the power is back.
  Outcome find(const Files& files) {
    if (files.empty()) return Outcome::kAbsent;
    const auto known = found_.find(files);
    if (known != found_.end()) return known->second;
    const std::string path = folder_ / "found";
    fs::remove_all(path);
    fs::create_directory(path);
    for (const auto& [name, bytes] : files) {
      if (!name.empty()) std::ofstream(path + "/" + name, std::ios::binary) << bytes;
    }
    return found_[files] = open(path);
  }

  std::set<Outcome> all_of(const Moment& moment) {
    std::set<Outcome> outcomes;
    for (const Files& files : left_by(moment, inode_of(disk()), "book")) {
      outcomes.insert(find(files));
    }
    return outcomes;
  }

 private:
  Outcome open(const std::string& path) {
    try {
      const auto saved = SavedCache::open(path);
      saved->verify();
      Cache session(*saved, saved->options(folder_.path(), {}));
      const int64_t tokens = saved->tokens();
      if (!expected_.contains(tokens) || next_of(session) != expected_[tokens]) {
        return Outcome::kWrong;
      }
      return tokens == kNewTokens ? Outcome::kNew : Outcome::kOld;
    } catch (const SessionError&) {
      return Outcome::kRefused;
    } catch (const ConfigError&) {
      return Outcome::kRefused;
    }
  }

  Folder folder_;
  std::map<int64_t, std::vector<float>> expected_;
  std::map<Files, Outcome> found_;
};

TEST_P(PowerLoss, LeavesAWholeSavedCacheOrNoneAndTheNewOneOnceSaveReturned) {
  const Outcome before = GetParam() ? Outcome::kOld : Outcome::kAbsent;
  const std::vector<Moment> all = moments(-1);
  EXPECT_GT(all.size(), 8u);
  EXPECT_EQ(all_of(all.front()), std::set{before});
  bool is_open = false;
  for (const Moment& moment : all) {
    for (const Outcome outcome : all_of(moment)) {
      EXPECT_TRUE(outcome == before || outcome == Outcome::kNew) << static_cast<int>(outcome);
      is_open = is_open || outcome == Outcome::kNew;
    }
  }
  EXPECT_TRUE(is_open);
  EXPECT_EQ(all_of(all.back()), std::set{Outcome::kNew});
}

/// The disk of the test above is harsh enough to need each sync that a save makes, and even then
/// nothing is opened that is wrong.
TEST_P(PowerLoss, IsNoticedOnceASyncIsLost) {
  for (int lost = 0;; ++lost) {
    SCOPED_TRACE(lost);
    const std::vector<Moment> all = moments(lost);
    std::set<Outcome> outcomes;
    for (const Moment& moment : all) outcomes.merge(all_of(moment));
    EXPECT_FALSE(outcomes.contains(Outcome::kWrong));
    if (lost == 5) {  // records, state, manifest, the folder, its name
      EXPECT_FALSE(outcomes.contains(Outcome::kRefused));
      break;
    }
    const bool is_late = all_of(all.back()) != std::set{Outcome::kNew};
    EXPECT_TRUE(outcomes.contains(Outcome::kRefused) || is_late);
  }
}

INSTANTIATE_TEST_SUITE_P(Target, PowerLoss, testing::Bool(),
                         [](const auto& replaces) { return replaces.param ? "Replaced" : "New"; });

}  // namespace
}  // namespace kvswap

#endif
