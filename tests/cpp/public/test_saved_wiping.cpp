// A fork's state goes through a file, which is zeros before its space is free again if asked.

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

#include "io/syscalls.h"
#include "saved_run.h"

#if KVSWAP_HAS_JSON

namespace kvswap {
namespace {

/// Linux, and what the file that a fork's state went through holds at its last write.
class StateKernel final : public Syscalls {
 public:
  StateKernel() { use_syscalls(this); }
  ~StateKernel() override { use_syscalls(nullptr); }
  int64_t pwrite(int fd, const void* data, size_t bytes, int64_t offset_bytes) override {
    const auto* text = static_cast<const char*>(data);
    if (offset_bytes == 0 && bytes > 10 && text[8] == '{' && text[9] == '"') state_ = fd;
    const int64_t count = Syscalls::pwrite(fd, data, bytes, offset_bytes);
    if (fd == state_) {
      std::ifstream file("/proc/self/fd/" + std::to_string(fd), std::ios::binary);
      content_.assign(std::istreambuf_iterator<char>(file), {});
    }
    return count;
  }
  const std::string& content() const { return content_; }

 private:
  int state_ = -1;
  std::string content_;
};

TEST(SavedWiping, AForksStateIsWipedWhereThatWasAsked) {
  for (const bool is_wiped : {false, true}) {
    const Folder folder;
    CacheOptions options = options_in(folder.path());
    options.settings.wipe_on_close = is_wiped;
    Cache session(options);
    step(session, 200, 1);
    const StateKernel kernel;
    const auto forked = session.fork();
    ASSERT_GT(kernel.content().size(), 1000u);
    EXPECT_EQ(kernel.content() == std::string(kernel.content().size(), '\0'), is_wiped);
    EXPECT_EQ(step(*forked, 1, 2), step(session, 1, 2));
  }
}

}  // namespace
}  // namespace kvswap

#endif  // KVSWAP_HAS_JSON
