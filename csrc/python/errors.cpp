#include "python/errors.h"

#include <cerrno>
#include <cstring>
#include <exception>

#include "torch/session_error.h"

namespace py = pybind11;

namespace kvswap {

namespace {

const char* class_of(SessionError::Kind kind) {
  switch (kind) {
    case SessionError::Kind::kBudget:
      return "BudgetError";
    case SessionError::Kind::kStorage:
      return "StorageError";
    case SessionError::Kind::kCorrupt:
      return "CorruptionError";
    case SessionError::Kind::kClosed:
      return "ClosedError";
  }
  return "KVSwapError";
}

void raise(const SessionError& error) {
  const py::object type = py::module_::import("kvswap_torch.errors").attr(class_of(error.kind()));
  py::object raised =
      error.error_number() != 0 ? type(error.error_number(), error.what()) : type(error.what());
  PyErr_SetObject(type.ptr(), raised.ptr());
}

}  // namespace

void register_errors() {
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const SessionError& error) {
      raise(error);
    }
  });
}

}  // namespace kvswap
