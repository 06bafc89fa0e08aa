// What a process does to itself, so that only a child can show it: a sandbox that is entered late,
// a file system that is unmounted at once.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "io/host_info.h"
#include "io/readers.h"
#include "io/wait_policy.h"
#include "io/write_queue.h"
#include "test_files.h"

namespace kvswap {
namespace {

constexpr int kCannot = 77;  // the system does not let a child do this
constexpr int64_t kBlock = 16384;
constexpr int kBlocks = 64;

/// What the child returns; minus the signal that ended it.
int in_child(const std::function<int()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    ::_exit(work());
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/// Reads every block at once, and compares; the step's number where that goes wrong.
int read_all(BlockReader& reader, const AlignedBytes& content) {
  const AlignedBytes landing(kBlocks * kBlock);
  std::vector<iovec> targets(kBlocks);
  std::vector<BlockRead> reads(kBlocks);
  for (int i = 0; i < kBlocks; ++i) {
    targets[i] = {landing.data() + i * kBlock, kBlock};
    reads[i] = {i * kBlock, {&targets[i], 1}};
  }
  auto ticket = reader.submit(reads);
  if (!ticket.is_ok()) return 11;
  if (!reader.wait(ticket.value()).is_ok()) return 12;
  return std::memcmp(landing.data(), content.data(), kBlocks * kBlock) == 0 ? 0 : 13;
}

/// From here on these system calls are refused to every thread, as in a sandbox entered later.
int forbid(std::initializer_list<unsigned> calls, unsigned error_number) {
  std::vector<sock_filter> filter = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const unsigned call : calls) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error_number));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program = {static_cast<unsigned short>(filter.size()), filter.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return kCannot;
  const long result =
      ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
  return result == 0 ? 0 : kCannot;
}

TEST(ChildProcess, ASandboxEnteredLaterTakesTheRingAndNotTheReads) {
  if (!read_host_info().has_uring) GTEST_SKIP() << read_host_info().uring_problem;
  const TempDirectory directory;
  const AlignedBytes content(kBlocks * kBlock);
  fill_random(content.span(), 5);
  const int result = in_child([&] {
    set_log([](const std::string&) {});
    const auto file = file_with(directory.path(), IoMode::kAuto, content.span());
    auto reader = must(open_reader(*file, {.kind = ReaderKind::kUring, .depth = 16})).reader;
    if (const int before = read_all(*reader, content)) return before;
    if (const int entered = forbid({__NR_io_uring_enter}, EPERM)) return entered;
    for (int turn = 0; turn < 3; ++turn) {
      if (const int after = read_all(*reader, content)) return 10 + after;
    }
    reader.reset();
    // One that is opened now begins on a lower rung.
    auto opened = open_reader(*file, {});
    if (!opened.is_ok()) return 31;
    return read_all(*opened.value().reader, content);
  });
  if (result == kCannot) GTEST_SKIP() << "seccomp filters are refused here";
  EXPECT_EQ(result, 0);
}

TEST(ChildProcess, WhereNoThreadCanBeHadReadsAndWritesGoOn) {
  const TempDirectory directory;
  const AlignedBytes content(kBlocks * kBlock);
  fill_random(content.span(), 7);
  const int result = in_child([&] {
    std::string said;
    set_log([&](const std::string& line) { said += line; });
    const auto file = must(DataFile::open({.directory = directory.path()}));
    must(file->reserve(kBlocks * kBlock));
    if (const int entered = forbid({__NR_clone, __NR_clone3}, EAGAIN)) return entered;
    ::setenv("KVSWAP_IO", "threads", 1);
    auto opened = open_reader(*file, {});
    if (!opened.is_ok()) return 31;
    if (opened.value().reader->name() != "sync") return 32;
    if (!contains(opened.value().reason, "ulimit -u")) return 33;
    const auto queue = must(WriteQueue::create(file.get(), {.buffer_bytes = kBlock, .buffers = 2}));
    if (!contains(said, "ulimit -u")) return 34;
    uint64_t newest = 0;
    for (int i = 0; i < kBlocks; ++i) {
      auto buffer = queue->acquire();
      if (!buffer.is_ok()) return 35;
      std::memcpy(buffer.value().data, content.data() + i * kBlock, kBlock);
      auto submitted = queue->submit(buffer.value(), i * kBlock, kBlock);
      if (!submitted.is_ok()) return 36;
      newest = submitted.value();
    }
    if (!queue->wait(newest).is_ok()) return 37;
    return read_all(*opened.value().reader, content);
  });
  if (result == kCannot) GTEST_SKIP() << "seccomp filters are refused here";
  EXPECT_EQ(result, 0);
}

bool write_text(const char* path, const std::string& text) {
  const int fd = ::open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const bool is_written = ::write(fd, text.data(), text.size()) == ssize_t(text.size());
  ::close(fd);
  return is_written;
}

/// The caller's mounts are its own from here on, and it may mount: root in a namespace of its own.
/// Files can be made only by a user that has a number there.
bool mount_apart() {
  const std::string user = "0 " + std::to_string(::getuid()) + " 1";
  const std::string group = "0 " + std::to_string(::getgid()) + " 1";
  return ::unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 &&
         write_text("/proc/self/setgroups", "deny") && write_text("/proc/self/uid_map", user) &&
         write_text("/proc/self/gid_map", group);
}

TEST(ChildProcess, AFileSystemCanBeUnmountedWhenTheFileIsClosed) {
  const TempDirectory directory;
  const AlignedBytes content(kBlocks * kBlock);
  fill_random(content.span(), 6);
  for (const ReaderKind kind : {ReaderKind::kAuto, ReaderKind::kThreads, ReaderKind::kSync}) {
    const int result = in_child([&] {
      if (!mount_apart()) return kCannot;
      if (::mount("none", directory.path().c_str(), "tmpfs", 0, "size=16m") != 0) return kCannot;
      for (int turn = 0; turn < 6; ++turn) {
        auto file = file_with(directory.path(), IoMode::kAuto, content.span());
        auto reader = must(open_reader(*file, {.kind = kind})).reader;
        if (const int wrong = read_all(*reader, content)) return wrong;
        reader.reset();
        file.reset();
        if (must(free_bytes(directory.path())) < (15 << 20)) return 21;
      }
      return ::umount(directory.path().c_str()) == 0 ? 0 : 22;
    });
    if (result == kCannot) GTEST_SKIP() << "a child may not mount here";
    EXPECT_EQ(result, 0);
  }
}

}  // namespace
}  // namespace kvswap
