#pragma once

#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <optional>

namespace kvswap {

/// Around a bound call: the interpreter is free meanwhile.
///
/// A signal's handler may run while the call waits for the disk, and raise. Where the call goes on
/// all the same, since what it waited for was not its own, what was raised comes when it returns.
class FreeInterpreter {
 public:
  FreeInterpreter() : exceptions_(std::uncaught_exceptions()), released_(std::in_place) {}
  ~FreeInterpreter() noexcept(false) {
    released_.reset();
    const bool is_thrown = std::uncaught_exceptions() > exceptions_;
    if (!is_thrown && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  }
  FreeInterpreter(const FreeInterpreter&) = delete;
  FreeInterpreter& operator=(const FreeInterpreter&) = delete;

 private:
  int exceptions_;
  std::optional<pybind11::gil_scoped_release> released_;
};

}  // namespace kvswap
