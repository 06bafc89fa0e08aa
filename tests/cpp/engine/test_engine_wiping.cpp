// What an engine wrote is zeros before its space is free again, if that was asked.

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "device/host_device.h"
#include "engine_run.h"
#include "io/syscalls.h"
#include "saved_engine.h"

namespace kvswap {
namespace {

/// Linux, and whether a file held anything but zeros when it was made empty.
class EmptyingKernel final : public Syscalls {
 public:
  EmptyingKernel() { use_syscalls(this); }
  ~EmptyingKernel() override { use_syscalls(nullptr); }

  int ftruncate(int fd, int64_t size_bytes) override {
    if (size_bytes == 0) {
      std::vector<std::byte> bytes(::lseek(fd, 0, SEEK_END));
      const std::string path = "/proc/self/fd/" + std::to_string(fd);
      std::ifstream(path, std::ios::binary)
          .read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
      held_ = !std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; });
      ++emptied_;
    }
    return Syscalls::ftruncate(fd, size_bytes);
  }
  bool held() const { return held_; }
  int emptied() const { return emptied_; }

 private:
  bool held_ = false;
  int emptied_ = 0;
};

TEST(EngineWiping, LeavesZerosInTheFileWhenAsked) {
  const TestDirectory directory;
  for (const bool is_on_device : {false, true}) {
    for (const bool is_wiped : {false, true}) {
      EmptyingKernel kernel;
      {
        EngineOptions options = small_options(directory.path());
        options.wipe_on_close = is_wiped;
        if (is_on_device) options.device = host_device({});
        EngineRun run(options, 5);
        run.forward(2, 200);
        run.compare_contents();
      }
      EXPECT_EQ(kernel.emptied(), 1);
      EXPECT_EQ(kernel.held(), !is_wiped);
    }
  }
}

/// Linux, and how many bytes that were no zeros went back to it before the end.
class ReturningKernel final : public Syscalls {
 public:
  ReturningKernel() { use_syscalls(this); }
  ~ReturningKernel() override { use_syscalls(nullptr); }

  int fallocate(int fd, int mode, int64_t offset_bytes, int64_t length_bytes) override {
    if (mode != 0) count(fd, offset_bytes, length_bytes);
    return Syscalls::fallocate(fd, mode, offset_bytes, length_bytes);
  }
  int ftruncate(int fd, int64_t size_bytes) override {
    const int64_t end = ::lseek(fd, 0, SEEK_END);
    if (size_bytes > 0 && size_bytes < end) count(fd, size_bytes, end - size_bytes);
    return Syscalls::ftruncate(fd, size_bytes);
  }
  int64_t returned() const { return returned_; }
  int64_t held() const { return held_; }

 private:
  void count(int fd, int64_t offset_bytes, int64_t length_bytes) {
    std::vector<char> bytes(length_bytes);
    std::ifstream file("/proc/self/fd/" + std::to_string(fd), std::ios::binary);
    file.seekg(offset_bytes);
    file.read(bytes.data(), length_bytes);
    returned_ += length_bytes;
    held_ += length_bytes - std::ranges::count(bytes, '\0');
  }
  int64_t returned_ = 0;
  int64_t held_ = 0;
};

TEST(EngineWiping, CoversWhatASavedFileLeavesOut) {
  for (const bool is_wiped : {false, true}) {
    const TestDirectory directory;
    ReturningKernel kernel;
    EngineOptions options = small_options(directory.path());
    options.wipe_on_close = is_wiped;
    EngineRun run(options, 5);
    run.forward(3, 200);
    run.select({0, 2});  // leaves holes
    run.crop(180);       // and an end
    SavedInMemory saved(directory.path());
    ASSERT_TRUE(run.engine().saver().save(saved).is_ok());
    ASSERT_TRUE(saved.is_linked());
    EXPECT_GT(kernel.returned(), 0);
    EXPECT_EQ(kernel.held() > 0, !is_wiped) << kernel.held();
  }
}

}  // namespace
}  // namespace kvswap
