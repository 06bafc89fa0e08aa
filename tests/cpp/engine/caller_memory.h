#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvswap {

/// Where the tensors of an engine's caller are: on the host, unless a test has them elsewhere.
class CallerMemory {
 public:
  virtual ~CallerMemory() = default;
  /// The address of a tensor that the engine is given, until the next one of the slot.
  virtual const void* give(int /*slot*/, const void* host, int64_t /*bytes*/) { return host; }
  /// Room for an answer as long as this one, and the answer from there; one at a time.
  virtual void* room(std::vector<std::byte>& answer) { return answer.data(); }
  virtual void take(std::vector<std::byte>& /*answer*/) {}

  static CallerMemory& of_host() {
    static CallerMemory memory;
    return memory;
  }
};

}  // namespace kvswap
