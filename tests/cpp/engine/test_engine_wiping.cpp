// What an engine wrote is zeros before its space is free again, if that was asked.

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "device/host_device.h"
#include "engine_run.h"
#include "io/kernel.h"

namespace kvswap {
namespace {

/// Linux, and whether a file held anything but zeros when it was made empty.
class EmptyingKernel final : public Kernel {
 public:
  EmptyingKernel() { use_kernel(this); }
  ~EmptyingKernel() override { use_kernel(nullptr); }

  int ftruncate(int fd, int64_t size_bytes) override {
    if (size_bytes == 0) {
      std::vector<std::byte> bytes(::lseek(fd, 0, SEEK_END));
      const std::string path = "/proc/self/fd/" + std::to_string(fd);
      std::ifstream(path, std::ios::binary)
          .read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
      held_ = !std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; });
      ++emptied_;
    }
    return Kernel::ftruncate(fd, size_bytes);
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

}  // namespace
}  // namespace kvswap
