#include "torch/parallel.h"

#include <c10/util/Exception.h>
#include <torch/csrc/stable/c/shim.h>

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

}  // namespace kvswap
