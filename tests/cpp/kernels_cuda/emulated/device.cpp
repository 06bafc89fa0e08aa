#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_runtime.h"

namespace emulated {
namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr int kWarp = 32;
constexpr int kThreads = 1024;  // of a block, at most

/// A place to go on from. A jump asks the kernel for nothing, where swapcontext() does so for the
/// signals' mask; but sanitizers know the latter alone.
#ifdef KVSWAP_IS_SANITIZED
struct Spot {
  ucontext_t context;
};
void go(Spot& from, Spot& to) { swapcontext(&from.context, &to.context); }
#else
struct Spot {
  ucontext_t context;
  jmp_buf left;
  bool was_left = false;
};
void go(Spot& from, Spot& to) {
  from.was_left = true;
  if (_setjmp(from.left) != 0) return;
  if (to.was_left) _longjmp(to.left, 1);
  setcontext(&to.context);
}
#endif

struct Fiber {
  Spot spot;
  std::unique_ptr<char[]> stack;
  bool is_done = false;
  bool is_waiting = false;
};

/// Lanes that meet: two sets of values, so that a fast lane's next one does not overwrite.
struct Warp {
  uint64_t values[2][kWarp] = {};
  int arrived = 0;
  int turn = 0;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  const std::function<void()>* body = nullptr;
  Spot scheduler;
  int count = 0;
  int current = 0;
  int alive = 0;
  int at_barrier = 0;
  int64_t events = 0;  // to notice when nobody moves any more
};

thread_local Block state;

[[noreturn]] void stop(const char* what) {
  std::fprintf(stderr, "emulated device: %s, thread %u of block (%u, %u, %u)\n", what,
               here.thread.x, here.block.x, here.block.y, here.block.z);
  std::abort();
}

void yield() {
  go(state.fibers[state.current].spot, state.scheduler);
  here.thread.x = static_cast<unsigned>(state.current);
}

void release_barrier() {
  state.at_barrier = 0;
  for (int i = 0; i < state.count; ++i) state.fibers[i].is_waiting = false;
  ++state.events;
}

/// One thread of each block, of one block after another.
void enter() {
  while (true) {
    (*state.body)();
    state.fibers[state.current].is_done = true;
    --state.alive;
    ++state.events;
    if (state.alive > 0 && state.at_barrier == state.alive) release_barrier();
    yield();
  }
}

void start(Fiber& fiber) {
  fiber.is_done = fiber.is_waiting = false;
  if (fiber.stack) return;
  fiber.stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
  ucontext_t& context = fiber.spot.context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
}

std::vector<int> thread_order(int count) {
  static thread_local std::mt19937 generator(1);
  std::vector<int> threads(count);
  std::iota(threads.begin(), threads.end(), 0);
  if (order == Order::kFalling) std::reverse(threads.begin(), threads.end());
  if (order == Order::kShuffled) std::shuffle(threads.begin(), threads.end(), generator);
  return threads;
}

void run_block() {
  state.alive = state.count;
  state.at_barrier = 0;
  for (Warp& warp : state.warps) warp = {};
  for (int i = 0; i < state.count; ++i) start(state.fibers[i]);
  const std::vector<int> threads = thread_order(state.count);
  while (state.alive > 0) {
    const int64_t before = state.events;
    for (const int thread : threads) {
      Fiber& fiber = state.fibers[thread];
      if (fiber.is_done || fiber.is_waiting) continue;
      state.current = thread;
      here.thread.x = static_cast<unsigned>(thread);
      go(state.scheduler, fiber.spot);
    }
    if (state.events == before) stop("threads wait for one another for ever");
  }
}

}  // namespace

void wait_for_block() {
  ++state.events;
  if (++state.at_barrier == state.alive) return release_barrier();
  state.fibers[state.current].is_waiting = true;
  while (state.fibers[state.current].is_waiting) yield();
}

const uint64_t* exchange(uint64_t value) {
  Warp& warp = state.warps[state.current / kWarp];
  const int turn = warp.turn;
  warp.values[turn & 1][state.current % kWarp] = value;
  ++state.events;
  if (++warp.arrived == kWarp) {
    warp.arrived = 0;
    ++warp.turn;
  }
  while (warp.turn == turn) yield();
  return warp.values[turn & 1];
}

void run(dim3 grid, dim3 block, const std::function<void()>& body) {
  if (block.x % kWarp != 0 || block.y != 1 || block.z != 1 || block.x > kThreads) {
    stop("a block must be whole warps in one dimension, at most 1024 threads");
  }
  state.count = static_cast<int>(block.x);
  if (state.fibers.empty()) state.fibers.resize(kThreads);  // they never move
  state.warps.assign(block.x / kWarp, {});
  state.body = &body;
  here.block_size = block;
  here.grid_size = grid;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        here.block = {x, y, z};
        run_block();
      }
    }
  }
}

}  // namespace emulated
