// The faulty kernel for Python's tests, which load this library beside the product's.

#include "io/faulty_kernel.h"

#include <memory>

namespace {

std::unique_ptr<kvswap::FaultyKernel> kernel;

}  // namespace

extern "C" {

/// Between the first call and disarm() the process has a disk that fails as it is told to.
/// call: as in kvswap::KernelCall.
void faulty_arm(int call, unsigned long nth, int is_lasting, int error_number, int is_short,
                int delay_us, int reorders) {
  if (kernel == nullptr) kernel = std::make_unique<kvswap::FaultyKernel>();
  kernel->arm({.call = static_cast<kvswap::KernelCall>(call),
               .nth = nth,
               .is_lasting = is_lasting != 0,
               .error_number = error_number,
               .is_short = is_short != 0,
               .delay_us = delay_us,
               .reorders = reorders != 0});
}

/// The disk is well; what it did stays known.
void faulty_heal() {
  if (kernel != nullptr) kernel->heal();
}

unsigned long faulty_injected() { return kernel == nullptr ? 0 : kernel->injected(); }
unsigned long faulty_seen(int call) {
  return kernel == nullptr ? 0 : kernel->seen(static_cast<kvswap::KernelCall>(call));
}

/// Linux itself again; no session may be open.
void faulty_disarm() { kernel.reset(); }
}
