#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <utility>

#include "io/pooled_memory.h"
#include "io/status.h"

namespace kvswap {

/// Where summaries and projections live: the host's memory, or a device's.
///
/// Counts what it holds. What one memory has allocated, another may hold too: it is freed when the
/// last releases it, and of those that hold it the first counts it. Copies happen in the order of
/// the calls and of the kernels that use the memory. Not thread-safe, but for letting go: what is
/// shared may be released by several threads.
class SummaryMemory : public std::enable_shared_from_this<SummaryMemory> {
 public:
  virtual ~SummaryMemory() = default;
  int64_t live_bytes() const { return live_bytes_; }
  /// Of live_bytes(), what another memory counts.
  int64_t shared_bytes() const { return shared_bytes_; }

  /// Aligned to 64 bytes; null where there is no more.
  std::shared_ptr<std::byte> allocate(int64_t bytes);
  /// For what will stay as large as it is: beside others of its kind (see HugePageArena).
  std::shared_ptr<std::byte> allocate_packed(int64_t bytes);
  /// The same bytes, held by this memory too, once; nobody may write to them any more.
  std::shared_ptr<std::byte> share(const std::shared_ptr<std::byte>& held);
  /// May another memory of its kind hold what it allocates, and outlive it?
  virtual bool is_shareable() const { return true; }
  virtual void copy(std::byte* to, const std::byte* from, int64_t bytes) = 0;
  /// `host` may change when it returns.
  virtual void upload(std::byte* to, const void* host, int64_t bytes) = 0;
  virtual Status download(void* host, const std::byte* from, int64_t bytes) = 0;
  /// Of the host, for the small things that belong to what is allocated.
  std::pmr::memory_resource& nodes() const { return *nodes_; }

 protected:
  virtual std::byte* take(int64_t bytes) = 0;
  virtual std::byte* take_packed(int64_t bytes) { return take(bytes); }
  virtual void let_go(std::byte* memory, int64_t bytes) = 0;

 private:
  class Block;
  struct LetGo;
  std::shared_ptr<std::byte> hold_new(std::byte* data, int64_t bytes);
  std::shared_ptr<std::byte> hold(std::byte* data, std::shared_ptr<Block> block);

  std::atomic<int64_t> live_bytes_ = 0;
  std::atomic<int64_t> shared_bytes_ = 0;
  std::unique_ptr<std::pmr::memory_resource> nodes_ = make_pooled_memory();
};

/// An allocator of a summary memory's nodes, which keeps that memory.
template <class T>
struct NodeAllocator {
  using value_type = T;
  std::shared_ptr<const SummaryMemory> memory;

  explicit NodeAllocator(std::shared_ptr<const SummaryMemory> of) : memory(std::move(of)) {}
  template <class Other>
  NodeAllocator(const NodeAllocator<Other>& other) : memory(other.memory) {}

  T* allocate(size_t count) {
    return static_cast<T*>(memory->nodes().allocate(count * sizeof(T), alignof(T)));
  }
  void deallocate(T* nodes, size_t count) {
    memory->nodes().deallocate(nodes, count * sizeof(T), alignof(T));
  }
  template <class Other>
  bool operator==(const NodeAllocator<Other>& other) const {
    return memory == other.memory;
  }
};

std::shared_ptr<SummaryMemory> make_host_summary_memory();

}  // namespace kvswap
