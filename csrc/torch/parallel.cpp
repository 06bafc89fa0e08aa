#include "torch/parallel.h"

#include <c10/util/Exception.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "io/thread_team.h"

namespace kvswap {
namespace {

using Body = std::function<void(int64_t, int64_t)>;

// at::parallel_for is a template that needs OpenMP where it is instantiated. This one is compiled
// inside libtorch, so that there is one pool whatever our flags are.
void run_on_torch_threads(int64_t count, int64_t grain, const Body& body) {
  const auto call = [](int64_t begin, int64_t end, void* context) {
    (*static_cast<const Body*>(context))(begin, end);
  };
  const AOTITorchError error =
      ::torch_parallel_for(0, count, grain, call, const_cast<Body*>(&body));
  TORCH_CHECK(error == AOTI_TORCH_SUCCESS, "parallel_for: a piece of work must not throw, one did");
}

}  // namespace

const ParallelFor& at_parallel_for() {
  static const ParallelFor parallel = run_on_torch_threads;
  return parallel;
}

ParallelFor few_threads_for() {
  constexpr uint32_t kThreadsMax = 8;
  static std::mutex mutex;
  static std::weak_ptr<ThreadTeam> shared;
  const std::lock_guard lock(mutex);
  std::shared_ptr<ThreadTeam> team = shared.lock();
  if (!team || !team->is_here()) {
    uint32_t threads = 1;
    TORCH_CHECK(torch_get_num_threads(&threads) == AOTI_TORCH_SUCCESS,
                "threads: torch must tell how many it has");
    team = ThreadTeam::start(static_cast<int>(std::clamp(threads, 1u, kThreadsMax)) - 1);
    shared = team;
  }
  return [team](int64_t count, int64_t grain, const Body& body) { team->run(count, grain, body); };
}

}  // namespace kvswap
