// The faulty kernel for Python's tests, which load this library beside the product's.

#include "io/faulty_kernel.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <memory>

#include "store/checksum.h"

namespace {

std::unique_ptr<kvswap::FaultyKernel> kernel;

/// Strikes the n-th call that changes a saved cache's files: the process is killed there, or the
/// call fails. What has reached the disk, and what has got a name, is written to a log.
class StepKernel final : public kvswap::Syscalls {
 public:
  StepKernel(long nth, int error_number, int log) : left_(nth), error_(error_number), log_(log) {}

  int fsync(int fd) override {
    if (strikes()) return -error_;
    const int result = Syscalls::fsync(fd);
    struct stat facts = {};
    if (result == 0 && ::fstat(fd, &facts) == 0) say("synced", facts.st_ino);
    return result;
  }
  int name_file(int fd, int folder, const char* name) override {
    return strikes() ? -error_ : Syscalls::name_file(fd, folder, name);
  }
  int rename(int folder, const char* from, const char* to, unsigned flags) override {
    if (strikes()) return -error_;
    const int result = Syscalls::rename(folder, from, to, flags);
    if (result == 0) say("renamed", 0);
    return result;
  }
  int make_folder(int parent, const char* name, mode_t mode) override {
    return strikes() ? -error_ : Syscalls::make_folder(parent, name, mode);
  }
  int open_at(int folder, const char* name, int flags, mode_t mode) override {
    return (flags & O_CREAT) != 0 && strikes() ? -error_
                                               : Syscalls::open_at(folder, name, flags, mode);
  }
  int64_t pwrite(int fd, const void* data, size_t bytes, int64_t offset_bytes) override {
    return strikes() ? -error_ : Syscalls::pwrite(fd, data, bytes, offset_bytes);
  }
  bool has_struck() const { return left_ < 0; }

 private:
  bool strikes() {
    if (left_-- != 0) return false;
    if (error_ == 0) ::raise(SIGKILL);
    return true;
  }
  void say(const char* what, unsigned long inode) const {
    if (log_ >= 0) ::dprintf(log_, "%s %lu\n", what, inode);
  }

  std::atomic<long> left_;
  const int error_;
  const int log_;
};

std::unique_ptr<StepKernel> steps;

}  // namespace

extern "C" {

/// Between the first call and disarm() the process has a disk that fails as it is told to.
/// call: as in kvswap::KernelCall.
void faulty_arm(int call, unsigned long nth, int is_lasting, int error_number, int is_short,
                int delay_us, int reorders, const char* name) {
  if (kernel == nullptr) kernel = std::make_unique<kvswap::FaultyKernel>();
  kernel->arm({.call = static_cast<kvswap::KernelCall>(call),
               .nth = nth,
               .is_lasting = is_lasting != 0,
               .error_number = error_number,
               .is_short = is_short != 0,
               .delay_us = delay_us,
               .reorders = reorders != 0,
               .name = name});
}

/// What a saved cache's manifest is signed by.
unsigned long checksum_of_bytes(const void* data, unsigned long size) {
  return kvswap::checksum_of({static_cast<const std::byte*>(data), size});
}

/// The disk is well; what it did stays known.
void faulty_heal() {
  if (kernel != nullptr) kernel->heal();
}

unsigned long faulty_injected() { return kernel == nullptr ? 0 : kernel->injected(); }
unsigned long faulty_seen(int call) {
  return kernel == nullptr ? 0 : kernel->seen(static_cast<kvswap::KernelCall>(call));
}

/// The n-th step of a save from now on (0: the first) fails with that error; 0: kills the process.
/// log: a descriptor, or -1.
void faulty_step(long nth, int error_number, int log) {
  steps = std::make_unique<StepKernel>(nth, error_number, log);
  kvswap::use_syscalls(steps.get());
}
int faulty_step_has_struck() { return steps != nullptr && steps->has_struck() ? 1 : 0; }
/// Linux itself again.
void faulty_step_end() {
  kvswap::use_syscalls(nullptr);
  steps.reset();
}

/// Linux itself again; no session may be open.
void faulty_disarm() { kernel.reset(); }
}
