// How much of a test that could go on for long runs: all of it in `make test-long`. Python's is
// tests/how_long.py.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>

namespace kvswap {

inline bool is_long() { return std::getenv("KVSWAP_TEST_LONG") != nullptr; }

/// Random lives, or what else is tried one after another: `few`, and all in `make test-long`;
/// KVSWAP_TEST_LIVES is another number.
inline int64_t lives(int64_t few, int64_t all) {
  const char* asked = std::getenv("KVSWAP_TEST_LIVES");
  if (asked != nullptr) return std::stoll(asked);
  return is_long() ? all : few;
}

/// The same of numbers that are tried from the first to the last: every so many.
inline int64_t stride(int64_t usual) { return is_long() ? 1 : usual; }

}  // namespace kvswap
