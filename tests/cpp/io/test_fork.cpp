#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "io/readers.h"
#include "io/write_queue.h"
#include "test_files.h"

namespace kvswap {
namespace {

/// A child gets AddressSanitizer's allocator as it stands, locked for ever where a thread that was
/// not forked held the lock: wait until all others sleep. The C library's allocator needs no care.
void wait_for_sanitizer() {
#if defined(__SANITIZE_ADDRESS__)
  const auto is_awake = [](const auto& task) {
    std::ifstream file(task.path() / "stat");
    std::string facts;
    std::getline(file, facts);
    const size_t name_end = facts.rfind(')');
    return task.path().filename() != std::to_string(::gettid()) && name_end != std::string::npos &&
           facts[name_end + 2] != 'S';
  };
  for (int quiet = 0; quiet < 3; ++quiet) {
    ::usleep(1000);
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    if (std::any_of(begin(tasks), end(tasks), is_awake)) quiet = -1;
  }
#endif
}

/// Runs `check` in a forked child, which the alarm ends if it hangs; true if it said so.
bool holds_in_child(const std::function<bool()>& check) {
  wait_for_sanitizer();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    ::_exit(check() ? 0 : 1);
  }
  int state = 0;
  ::waitpid(child, &state, 0);
  return WIFEXITED(state) && WEXITSTATUS(state) == 0;
}

bool is_refused(const Status& status) {
  return status.code() == StatusCode::kInvalid && contains(status.message(), "fork");
}

class AfterFork : public testing::Test {
 protected:
  void SetUp() override { fill_random(content_.span(), 41); }

  TempDirectory directory_;
  AlignedBytes content_{1 << 20};
};

TEST_F(AfterFork, AReaderRefusesAndClosesWithoutAHang) {
  for (const ReaderKind kind : {ReaderKind::kSync, ReaderKind::kThreads, ReaderKind::kAuto}) {
    const auto file = file_with(directory_.path(), IoMode::kAuto, content_.span());
    auto reader = std::move(must(open_reader(*file, {.kind = kind})).reader);
    const AlignedBytes landing(4096);
    const iovec target{landing.data(), landing.size()};
    const BlockRead read{8192, {&target, 1}};
    const Ticket before = must(reader->submit({&read, 1}));
    EXPECT_TRUE(holds_in_child([&] {
      const auto ticket = reader->submit({&read, 1});
      const bool refused = !ticket.is_ok() && is_refused(ticket.status()) &&
                           is_refused(reader->wait(before)) && reader->is_done(before);
      reader.reset();
      return refused;
    }));
    must(reader->wait(before));
    EXPECT_TRUE(std::equal(landing.data(), landing.data() + 4096, content_.data() + 8192));
  }
}

TEST_F(AfterFork, AReaderOfTheChildsOwnHasThreadsOfItsOwn) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer takes no new thread in a forked child";
#endif
  const auto file = file_with(directory_.path(), IoMode::kAuto, content_.span());
  const auto reader = std::move(must(open_reader(*file, {.kind = ReaderKind::kThreads})).reader);
  EXPECT_TRUE(holds_in_child([&] {
    const auto own = file_with(directory_.path(), IoMode::kAuto, content_.span());
    auto opened = open_reader(*own, {.kind = ReaderKind::kThreads});
    const AlignedBytes landing(4096);
    const iovec target{landing.data(), landing.size()};
    const BlockRead read{8192, {&target, 1}};
    const auto ticket = opened.value().reader->submit({&read, 1});
    return ticket.is_ok() && opened.value().reader->wait(ticket.value()).is_ok() &&
           std::equal(landing.data(), landing.data() + 4096, content_.data() + 8192);
  }));
}

TEST_F(AfterFork, AWriteQueueRefusesAndClosesWithoutAHang) {
  const auto file = file_with(directory_.path(), IoMode::kAuto, content_.span());
  auto queue = must(WriteQueue::create(file.get(), {.buffer_bytes = 8192, .buffers = 2}));
  EXPECT_TRUE(holds_in_child([&] {
    const bool refused = is_refused(queue->acquire().status()) && is_refused(queue->wait(0));
    queue.reset();
    return refused;
  }));
  WriteQueue::Buffer buffer = must(queue->acquire());
  std::fill_n(buffer.data, 8192, std::byte{7});
  must(queue->wait(must(queue->submit(buffer, 0, 8192))));
}

}  // namespace
}  // namespace kvswap
