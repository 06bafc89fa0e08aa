#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "io/layered_file.h"
#include "io/read_coalescing.h"
#include "io/read_only_file.h"
#include "io/readers.h"
#include "io/test_files.h"

namespace kvswap {
namespace {

constexpr int64_t kRecord = 4096;

std::shared_ptr<DataFile> file_of(const TempDirectory& directory, char letter) {
  const AlignedBytes bytes(2 * kRecord);
  std::fill_n(bytes.data(), bytes.size(), static_cast<std::byte>(letter));
  return file_with(directory.path(), IoMode::kAuto, bytes.span());
}

TEST(LayeredFile, EveryReaderReadsEachByteFromItsFileAlsoAfterASeal) {
  TempDirectory directory;
  for (const ReaderKind kind : {ReaderKind::kAuto, ReaderKind::kThreads, ReaderKind::kSync}) {
    const int64_t second = LayeredFile::begin_above(2 * kRecord, kRecord);
    LayeredFile stack({{file_of(directory, 'a'), 0}}, file_of(directory, 'b'), second);
    auto opened = must(open_reader(stack, {.kind = kind}));
    const int64_t third = LayeredFile::begin_above(second + 2 * kRecord, kRecord);
    stack.seal(file_of(directory, 'c'), third);
    AlignedBytes bytes(6 * kRecord);
    std::vector<Placement> placements;
    int64_t at = 0;
    for (const int64_t begin : {third, second, int64_t{0}}) {
      for (int64_t i = 0; i < 2; ++i, ++at) {
        placements.push_back({begin + i * kRecord, kRecord, bytes.data() + at * kRecord});
      }
    }
    AlignedBytes discard_buffer(16 << 20);
    MergedReads merged;
    merged.build(placements, {.gap_bytes_max = 16 << 20,
                              .merged_bytes_max = 64 << 20,
                              .discard_buffer = discard_buffer.data()});
    EXPECT_EQ(merged.reads().size(), 3);
    must(opened.reader->wait(must(opened.reader->submit(merged.reads()))));
    for (int64_t i = 0; i < 6 * kRecord; ++i) {
      ASSERT_EQ(bytes.data()[i], static_cast<std::byte>("cba"[i / (2 * kRecord)])) << i;
    }
  }
}

TEST(LayeredFile, WhatIsNewGoesToTheOwnFileAlone) {
  TempDirectory directory;
  auto below = file_of(directory, 'a');
  auto own = file_of(directory, 'b');
  const int64_t begin = LayeredFile::begin_above(2 * kRecord, kRecord);
  LayeredFile stack({{below, 0}}, own, begin);
  AlignedBytes bytes(kRecord);
  must(stack.reserve(begin + 4 * kRecord));
  must(stack.write(begin + 3 * kRecord, bytes.span()));
  char first = 0;
  ASSERT_EQ(::pread(own->fd(), &first, 0, 0), 0);
  EXPECT_EQ(stack.place_of(begin + 5).fd, own->fd());
  EXPECT_EQ(stack.place_of(begin + 5).offset_bytes, 5);
  EXPECT_EQ(stack.place_of(5).fd, below->fd());
}

TEST(DataFile, KeepsItsContentOnlyWhenItIsTold) {
  TempDirectory directory;
  for (const bool is_kept : {true, false}) {
    auto file = file_of(directory, 'a');
    const OwnedFd held(::dup(file->fd()));
    must(file->shrink(kRecord));
    if (is_kept) file->keep();
    file.reset();
    EXPECT_EQ(::lseek(held.get(), 0, SEEK_END), is_kept ? kRecord : 0);
  }
}

}  // namespace
}  // namespace kvswap
