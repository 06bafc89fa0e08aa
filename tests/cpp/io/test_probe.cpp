#include <gtest/gtest.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>

#include "io/probe.h"
#include "test_files.h"

namespace kvswap {
namespace {

constexpr int64_t kMiB = 1 << 20;

/// Opens and fills.
std::unique_ptr<DiskProbe> filled_probe(const ProbeOptions& options) {
  auto probe = must(DiskProbe::open(options));
  while (must(probe->fill()).bytes > 0) {
  }
  EXPECT_GE(must(probe->sync()), 0);
  return probe;
}

TEST(DiskProbe, MeasuresTheDiskAndLeavesNothing) {
  const TempDirectory directory;
  const auto probe = filled_probe({.directory = directory.path(), .scratch_bytes = 20 * kMiB});
  EXPECT_EQ(probe->filled_bytes(), 16 * kMiB);  // whole pieces only
  EXPECT_FALSE(probe->facts().in_memory);
  EXPECT_TRUE(directory.is_empty());
  for (const int depth : {1, 7, 64}) {
    const ProbeCell cell = must(probe->measure(16 << 10, depth, 0.02));
    EXPECT_GT(cell.bytes_per_second, 0);
    EXPECT_GT(cell.latency_seconds, 0);
    EXPECT_GE(cell.latency_p99_seconds, cell.latency_seconds);
  }
}

TEST(DiskProbe, WritesWhatDoesNotCompress) {
  const TempDirectory directory;
  const auto probe = filled_probe({.directory = directory.path(), .scratch_bytes = 16 * kMiB});
  const AlignedBytes bytes(256 << 10);
  ASSERT_EQ(::pread(probe->fd(), bytes.data(), bytes.size(), 8 * kMiB),
            static_cast<ssize_t>(bytes.size()));
  std::vector<uint64_t> words(bytes.size() / 8);
  std::memcpy(words.data(), bytes.data(), bytes.size());
  std::sort(words.begin(), words.end());
  EXPECT_EQ(std::unique(words.begin(), words.end()), words.end());
}

TEST(DiskProbe, AModelledDeviceIsAsItIsDesigned) {
  const TempDirectory directory;
  const auto probe =
      filled_probe({.directory = directory.path(), .device = "emmc", .scratch_bytes = 8 * kMiB});
  EXPECT_EQ(probe->facts().reader, "emmc(model)");
  // Only limits that a busy machine cannot break: 250 MB/s, 200 us, two reads at a time.
  const ProbeCell large = must(probe->measure(256 << 10, 8, 0.05));
  EXPECT_LE(large.bytes_per_second, 250e6);
  const ProbeCell small = must(probe->measure(4096, 64, 0.05));
  EXPECT_LE(small.bytes_per_second, 4096 * 2 / 200e-6);
  EXPECT_GE(small.latency_seconds, 200e-6);
  const ProbeCell one = must(probe->measure(4096, 1, 0.05));
  EXPECT_GE(one.latency_seconds, 200e-6);
}

TEST(DiskProbe, KnowsMemoryFromADisk) {
  const TempDirectory directory("/dev/shm");
  const auto probe = filled_probe({.directory = directory.path(), .scratch_bytes = 8 * kMiB});
  EXPECT_TRUE(probe->facts().in_memory);
  EXPECT_GT(must(probe->measure(4096, 4, 0.01)).bytes_per_second, 0);
}

TEST(DiskProbe, WhenTheDiskIsFullWhatIsWrittenStays) {
  const TempDirectory directory;
  if (::mount("tmpfs", directory.path().c_str(), "tmpfs", 0, "size=20m") != 0) {
    GTEST_SKIP() << "a small file system cannot be mounted here";
  }
  {
    const auto probe =
        must(DiskProbe::open({.directory = directory.path(), .scratch_bytes = 64 * kMiB}));
    EXPECT_EQ(must(probe->fill()).bytes, 8 * kMiB);
    EXPECT_EQ(must(probe->fill()).bytes, 8 * kMiB);
    EXPECT_EQ(probe->fill().status().error_number(), ENOSPC);
    EXPECT_EQ(probe->filled_bytes(), 16 * kMiB);
    EXPECT_GT(must(probe->measure(4096, 4, 0.01)).bytes_per_second, 0);
  }
  EXPECT_TRUE(directory.is_empty());
  EXPECT_EQ(::umount2(directory.path().c_str(), MNT_DETACH), 0);
}

TEST(DiskProbe, WithoutDirectReadsItSaysSoAndMeasuresAllTheSame) {
  const TempDirectory directory;
  if (::mount("ramfs", directory.path().c_str(), "ramfs", 0, "") != 0) {
    GTEST_SKIP() << "a file system without O_DIRECT cannot be mounted here";
  }
  {
    const auto probe = filled_probe({.directory = directory.path(), .scratch_bytes = 8 * kMiB});
    EXPECT_FALSE(probe->facts().direct);
    EXPECT_TRUE(probe->facts().in_memory);
    const auto& said = probe->facts().fallbacks;
    EXPECT_TRUE(std::any_of(said.begin(), said.end(), [](const std::string& sentence) {
      return contains(sentence, "O_DIRECT is refused");
    }));
    EXPECT_GT(must(probe->measure(4096, 8, 0.01)).bytes_per_second, 0);
  }
  EXPECT_EQ(::umount2(directory.path().c_str(), MNT_DETACH), 0);
}

TEST(DiskProbe, RefusesWhatMakesNoSense) {
  const TempDirectory directory;
  const std::string path = directory.path();
  EXPECT_EQ(DiskProbe::open({.directory = path, .scratch_bytes = 1}).status().code(),
            StatusCode::kInvalid);
  EXPECT_EQ(DiskProbe::open({.directory = path, .device = "floppy", .scratch_bytes = 8 * kMiB})
                .status()
                .code(),
            StatusCode::kInvalid);
  EXPECT_EQ(DiskProbe::open({.directory = path + "/no", .scratch_bytes = 8 * kMiB})
                .status()
                .error_number(),
            ENOENT);
  const auto probe = must(DiskProbe::open({.directory = path, .scratch_bytes = 8 * kMiB}));
  EXPECT_FALSE(probe->measure(4096, 1, 0.01).is_ok());  // nothing written yet
  EXPECT_EQ(must(probe->fill()).bytes, 8 * kMiB);
  EXPECT_FALSE(probe->measure(4095, 1, 0.01).is_ok());
  EXPECT_FALSE(probe->measure(0, 1, 0.01).is_ok());
  EXPECT_FALSE(probe->measure(4096, 0, 0.01).is_ok());
  EXPECT_FALSE(probe->measure(8 * kMiB, 64, 0.01).is_ok());
  EXPECT_FALSE(probe->measure(4096, 1, 0.0).is_ok());
  probe->close();
  EXPECT_EQ(probe->fd(), -1);
  EXPECT_FALSE(probe->fill().is_ok());
  EXPECT_FALSE(probe->sync().is_ok());
  EXPECT_FALSE(probe->measure(4096, 1, 0.01).is_ok());
}

}  // namespace
}  // namespace kvswap
