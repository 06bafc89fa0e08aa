// Bytes of a file that may fail or be cut meanwhile: an error each, and no signal.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "faulty_kernel.h"
#include "io/anonymous_file.h"
#include "io/failure.h"
#include "io/file_bytes.h"
#include "test_files.h"

namespace kvswap {
namespace {

class Bytes : public testing::Test {
 protected:
  Bytes() : file_(::open((directory_.path() + "/a").c_str(), O_RDWR | O_CREAT, 0600)) {
    for (int i = 0; i < 20000; ++i) content_ += static_cast<char>(i * 7);
    EXPECT_EQ(::write(file_.get(), content_.data(), content_.size()),
              static_cast<ssize_t>(content_.size()));
  }

  Status read(int64_t offset, int64_t length) const {
    auto bytes = FileBytes::read(file_.get(), {offset, length}, "a");
    if (!bytes.is_ok()) return bytes.status();
    const std::span<const std::byte> got = bytes.value().bytes();
    EXPECT_EQ(got.size(), static_cast<size_t>(length));
    EXPECT_EQ(std::memcmp(got.data(), content_.data() + offset, got.size()), 0);
    return Status::ok();
  }

  const TempDirectory directory_;
  const OwnedFd file_;
  std::string content_;
};

TEST_F(Bytes, AnyPartIsRead) {
  for (const int64_t offset : {0, 1, 4096, 19999}) {
    EXPECT_TRUE(read(offset, 20000 - offset).is_ok());
    EXPECT_TRUE(read(offset, 1).is_ok());
  }
  EXPECT_EQ(must(FileBytes::read(file_.get(), {0, 0}, "a")).bytes().size(), 0u);
}

TEST_F(Bytes, WhatIsNotThereIsDamageAndWhatFailsIsNot) {
  const Status cut = read(19000, 1001);
  EXPECT_EQ(cut.code(), StatusCode::kCorrupt);
  EXPECT_NE(cut.message().find("must have 20001 bytes"), std::string::npos);
  EXPECT_EQ(failure_of(cut), Failure::kDamage);
  FaultyKernel kernel;
  for (const int error : {EIO, ENOMEM, EACCES, EAGAIN, EINTR}) {
    kernel.arm({.call = KernelCall::kRead, .is_lasting = true, .error_number = error});
    const Status failed = read(0, 20000);
    EXPECT_EQ(failed.code(), StatusCode::kStorage) << error;
    EXPECT_EQ(failed.error_number(), error);
    kernel.arm({.call = KernelCall::kRead, .error_number = error});
    EXPECT_EQ(read(0, 20000).is_ok(), error == EIO || error == EAGAIN || error == EINTR) << error;
  }
  kernel.arm({.call = KernelCall::kRead, .is_lasting = true, .is_short = true});
  EXPECT_TRUE(read(0, 20000).is_ok());
  EXPECT_GT(kernel.injected(), 1u);
}

TEST_F(Bytes, AFaultMayBeOfOneFileAlone) {
  FaultyKernel kernel;
  kernel.arm(
      {.call = KernelCall::kRead, .is_lasting = true, .error_number = EIO, .name = "no such file"});
  EXPECT_TRUE(read(0, 20000).is_ok());
  kernel.arm({.call = KernelCall::kRead, .is_lasting = true, .error_number = EIO, .name = "/a"});
  EXPECT_EQ(read(0, 20000).error_number(), EIO);
}

TEST(Failures, LackIsPassingRightsArePermanentAndBytesAreDamage) {
  for (const int error : {EMFILE, ENFILE, ENOMEM, EAGAIN, EINTR, EIO, ENOSPC, EDQUOT, EBUSY,
                          ETIMEDOUT, ESTALE, ENODEV}) {
    EXPECT_EQ(failure_of(error), Failure::kPassing) << error;
    EXPECT_EQ(failure_of(Status::storage("a", error)), Failure::kPassing) << error;
  }
  for (const int error : {EACCES, EPERM, EROFS, ENOENT, ENOTDIR, EINVAL, EFBIG, ELOOP, EEXIST, 0}) {
    EXPECT_EQ(failure_of(error), Failure::kPermanent) << error;
  }
  EXPECT_EQ(failure_of(Status::corrupt("a", "b")), Failure::kDamage);
  EXPECT_EQ(failure_of(Status::late("a")), Failure::kPassing);
  EXPECT_EQ(failure_of(Status::invalid("a")), Failure::kPermanent);
  EXPECT_STREQ(failure_name(Failure::kDamage), "damage");
}

}  // namespace
}  // namespace kvswap
