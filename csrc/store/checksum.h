#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace kvswap {

/// XXH3 of some bytes.
uint64_t checksum_of(std::span<const std::byte> bytes);

/// checksum_of() of bytes that come in pieces.
class RunningChecksum {
 public:
  RunningChecksum();
  ~RunningChecksum();
  RunningChecksum(const RunningChecksum&) = delete;
  RunningChecksum& operator=(const RunningChecksum&) = delete;

  void add(std::span<const std::byte> bytes);
  uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Whose a record is: its bytes sum up otherwise as any other's.
struct RecordOf {
  uint64_t seed = 0;  // of the session
  int64_t layer = 0;
  int64_t group = 0;
  uint32_t serial = 0;
};
/// bytes: payload and padding.
uint32_t record_checksum(std::span<const std::byte> bytes, const RecordOf& of);

/// "xxh3": saved sums are compared by the same one alone.
const char* checksum_name();

}  // namespace kvswap
