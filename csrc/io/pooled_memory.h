#pragma once

#include <memory>
#include <memory_resource>

namespace kvswap {

/// Memory for many small things that stay, taken from the kernel in pieces of at most 64 KiB.
///
/// Not from the heap: what stays between large blocks that come and go, a prefill's tensors, keeps
/// the heap from using their places again, and the process grows by all that ever passed through.
/// Freed blocks are used again; pieces go back with the resource. Thread-safe;
/// nothing of it stays with a thread, so a thread that used it may end after the resource is freed.
std::unique_ptr<std::pmr::memory_resource> make_pooled_memory();

}  // namespace kvswap
