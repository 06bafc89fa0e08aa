#include "python/errors.h"

#include <cerrno>
#include <cstring>
#include <exception>
#include <string>

#include "kvswap/errors.h"
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
    case SessionError::Kind::kBusy:
    case SessionError::Kind::kInterrupted:
    case SessionError::Kind::kDropped:
      break;
  }
  return "KVSwapError";
}

/// Without its " (errno N)", which OSError itself puts in front.
std::string message_of(const SessionError& error) {
  std::string message = error.what();
  const std::string number = " (errno " + std::to_string(error.error_number()) + ")";
  for (size_t at; (at = message.find(number)) != std::string::npos;) {
    message.erase(at, number.size());
  }
  return message;
}

void raise(const SessionError& error) {
  // A signal's handler has raised already: KeyboardInterrupt, as a rule.
  if (error.kind() == SessionError::Kind::kInterrupted && PyErr_Occurred() != nullptr) return;
  const py::object type = py::module_::import("kvswap_torch.errors").attr(class_of(error.kind()));
  py::object raised;
  if (error.error_number() == 0) {
    raised = type(error.what());
  } else if (error.path().empty()) {
    raised = type(error.error_number(), message_of(error));
  } else {
    raised = type(error.error_number(), message_of(error), error.path());
  }
  PyErr_SetObject(type.ptr(), raised.ptr());
}

}  // namespace

void register_errors() {
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const SessionError& error) {
      raise(error);
    } catch (const ConfigError& error) {
      const py::object type = py::module_::import("kvswap_torch.errors").attr("ConfigError");
      PyErr_SetObject(type.ptr(), type(error.what()).ptr());
    }
  });
}

}  // namespace kvswap
