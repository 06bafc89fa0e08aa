#include <gtest/gtest.h>

#include "io/host_info.h"
#include "test_files.h"

namespace kvswap {
namespace {

TEST(HostInfo, SaysWhatIsThere) {
  const HostInfo info = read_host_info();
  EXPECT_GE(info.page_bytes, 4096);
  EXPECT_FALSE(info.kernel_release.empty());
  EXPECT_EQ(info.has_uring, info.uring_problem.empty());
  EXPECT_GE(info.locked_memory_bytes, -1);
}

TEST(HostInfo, ProbesADirectory) {
  const TempDirectory directory;
  const DirectoryInfo info = must(probe_directory(directory.path()));
  EXPECT_GE(info.alignment_bytes, 512);
  EXPECT_EQ(info.takes_direct, info.fallbacks.empty());
  EXPECT_GT(info.free_bytes, 0);
  EXPECT_FALSE(probe_directory("/no/such/place").is_ok());
  EXPECT_TRUE(directory.is_empty());
}

}  // namespace
}  // namespace kvswap
