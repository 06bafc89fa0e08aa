#pragma once

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace kvswap {

/// Whether core dumps leave out the memory at `address`: the flag that /proc/self/smaps calls dd.
inline bool is_left_out_of_dumps(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<uint64_t>(address);
  bool is_here = false;
  for (std::string line; std::getline(maps, line);) {
    uint64_t begin = 0;
    uint64_t end = 0;
    if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " ", &begin, &end) == 2) {
      is_here = begin <= wanted && wanted < end;
    } else if (is_here && line.starts_with("VmFlags:")) {
      std::istringstream flags(line);
      for (std::string flag; flags >> flag;) {
        if (flag == "dd") return true;
      }
      return false;
    }
  }
  return false;
}

/// Another way to a page of memory, which stays when the memory is given back: a pipe refers to it.
class SecondLook {
 public:
  static constexpr size_t kBytes = 4096;

  explicit SecondLook(std::byte* page) {
    if (::pipe2(ends_, O_CLOEXEC) != 0) return;
    const iovec target = {page, kBytes};
    works_ = ::vmsplice(ends_[1], &target, 1, 0) == static_cast<ssize_t>(kBytes);
  }
  ~SecondLook() {
    if (ends_[0] >= 0) ::close(ends_[0]);
    if (ends_[1] >= 0) ::close(ends_[1]);
  }
  SecondLook(const SecondLook&) = delete;
  SecondLook& operator=(const SecondLook&) = delete;

  bool works() const { return works_; }
  /// What the page holds by now; once.
  std::vector<std::byte> bytes() {
    std::vector<std::byte> read(kBytes);
    size_t done = 0;
    while (done < kBytes) {
      const ssize_t count = ::read(ends_[0], read.data() + done, kBytes - done);
      if (count <= 0) break;
      done += static_cast<size_t>(count);
    }
    read.resize(done);
    return read;
  }

 private:
  int ends_[2] = {-1, -1};
  bool works_ = false;
};

}  // namespace kvswap
