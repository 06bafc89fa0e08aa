#include <torch/csrc/utils/pybind.h>

#include "io/host_info.h"
#include "kernels/cpu_features.h"
#include "kvswap/settings_rules.h"
#include "python/errors.h"
#include "python/probe.h"
#include "python/saved.h"
#include "torch/session.h"

namespace py = pybind11;
using kvswap::Budget;
using kvswap::CoreOptions;
using kvswap::ElementType;
using kvswap::ModelShape;
using kvswap::Session;

namespace {

at::ScalarType scalar_type(ElementType type) {
  return type == ElementType::kFloat32    ? at::kFloat
         : type == ElementType::kBFloat16 ? at::kBFloat16
                                          : at::kHalf;
}

ElementType element_type(at::ScalarType type) {
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf,
                    "session: dtype must be float32, bfloat16 or float16, got ", type);
  return type == at::kFloat      ? ElementType::kFloat32
         : type == at::kBFloat16 ? ElementType::kBFloat16
                                 : ElementType::kFloat16;
}

/// A property for a member of a member.
template <typename Inner, typename T>
void bind_inner(py::class_<CoreOptions>& options, const char* name, Inner CoreOptions::* inner,
                T Inner::* member) {
  options.def_property(
      name, [=](const CoreOptions& self) { return self.*inner.*member; },
      [=](CoreOptions& self, const T& value) { self.*inner.*member = value; });
}

/// Every setting of the table, and what else a session is made of, as properties of one object.
void bind_options(py::module_& module) {
  py::class_<CoreOptions> options(module, "SessionOptions");
  options.def(py::init<>())
      .def_readwrite("ranks", &CoreOptions::ranks)
      .def_readwrite("directory", &CoreOptions::directory)
      .def_readwrite("device", &CoreOptions::device)
      .def_readwrite("timeline_spans", &CoreOptions::timeline_spans)
      .def_property(
          "dtype", [](const CoreOptions& self) { return scalar_type(self.shape.dtype); },
          [](CoreOptions& self, at::ScalarType type) { self.shape.dtype = element_type(type); });
  bind_inner(options, "layers", &CoreOptions::shape, &ModelShape::layers);
  bind_inner(options, "query_heads", &CoreOptions::shape, &ModelShape::heads);
  bind_inner(options, "kv_heads", &CoreOptions::shape, &ModelShape::kv_heads);
  bind_inner(options, "head_dim", &CoreOptions::shape, &ModelShape::head_dim);
  bind_inner(options, "kv_memory_bytes", &CoreOptions::budget, &Budget::kv_memory_bytes);
  bind_inner(options, "max_context", &CoreOptions::budget, &Budget::max_context);
  bind_inner(options, "max_batch", &CoreOptions::budget, &Budget::max_batch);
  kvswap::visit_settings([&](const char* name, auto member, const auto&) {
    bind_inner(options, name, &CoreOptions::settings, member);
  });
}

/// attend() or extend() with the fields of ScoreTerms as arguments.
template <auto kMethod>
at::Tensor with_terms(Session& session, int64_t layer, const at::Tensor& query,
                      const at::Tensor& keys, const at::Tensor& values, double scale,
                      double softcap, const std::optional<at::Tensor>& sinks) {
  return (session.*kMethod)(layer, query, keys, values, scale, {softcap, sinks});
}

std::unique_ptr<Session> with_question(std::unique_ptr<Session> session) {
  // A signal's handler runs, and may raise, while a call waits for the disk.
  session->set_question([] {
    const py::gil_scoped_acquire held;
    return PyErr_CheckSignals() != 0;
  });
  return session;
}

std::unique_ptr<Session> open_session(const CoreOptions& options) {
  // Not as a call guard: pybind11 registers the new object inside of it.
  const py::gil_scoped_release released;
  return with_question(std::make_unique<Session>(options));
}

void bind_session(py::module_& module) {
  // Reads, packing and attention need no interpreter.
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Session> session(module, "Session");
  kvswap::bind_saved(module, session, with_question);
  session.def(py::init(&open_session), py::arg("options"))
      .def_static("memory_need", &Session::memory_need, py::arg("options"), py::arg("batch"),
                  py::arg("context"), py::arg("alignment_bytes") = 512)
      .def("declare", &Session::declare, py::arg("valid"), Released())
      .def("look_ahead", &Session::look_ahead, py::arg("layer"), py::arg("query"),
           py::arg("scale") = py::none(), Released())
      .def("override_selection", &Session::override_selection, py::arg("layer"), py::arg("groups"))
      .def("give_scores", &Session::give_scores, py::arg("layer"), py::arg("scores"))
      .def("give_worth", &Session::give_worth, py::arg("layer"), py::arg("worth"),
           py::arg("decay") = py::none())
      .def("needs_scores", &Session::needs_scores, py::arg("layer"), py::arg("queries"))
      .def("append", &Session::append, py::arg("layer"), py::arg("keys"), py::arg("values"),
           Released())
      .def("attend", with_terms<&Session::attend>, py::arg("layer"), py::arg("query"),
           py::arg("keys"), py::arg("values"), py::arg("scale"), py::arg("softcap") = 0.0,
           py::arg("sinks") = py::none(), Released())
      .def("extend", with_terms<&Session::extend>, py::arg("layer"), py::arg("query"),
           py::arg("keys"), py::arg("values"), py::arg("scale"), py::arg("softcap") = 0.0,
           py::arg("sinks") = py::none(), Released())
      .def("set_projection", &Session::set_projection, py::arg("layer"), py::arg("key_projection"),
           py::arg("query_projection"), Released())
      .def("needs_projection", &Session::needs_projection, py::arg("layer"))
      .def("attends_all", &Session::attends_all, py::arg("layer"))
      .def("read_back", &Session::read_back, py::arg("layer"), py::arg("begin"), py::arg("end"),
           Released())
      .def("last_selection", &Session::last_selection, py::arg("layer"))
      .def("select_sequences", &Session::select_sequences, py::arg("indices"), Released())
      .def("crop", &Session::crop, py::arg("columns"), Released())
      .def("reset", &Session::reset, Released())
      .def("close", &Session::close, Released())
      .def("columns", &Session::columns, py::arg("layer"))
      .def("common_columns", &Session::common_columns)
      .def("batch", &Session::batch)
      .def("counters", &Session::counters)
      .def("facts", &Session::facts)
      .def("ledger", &Session::ledger)
      .def("timeline", &Session::timeline, Released())
      .def("record_predict", &Session::record_predict, py::arg("layer"), py::arg("began_ns"));
}

py::dict system_info(const std::string& path) {
  const kvswap::HostInfo host = kvswap::read_host_info();
  py::dict info;
  info["has_uring"] = host.has_uring;
  info["uring_problem"] = host.uring_problem;
  info["kernel_release"] = host.kernel_release;
  info["page_bytes"] = host.page_bytes;
  info["locked_memory_bytes"] = host.locked_memory_bytes;
  info["simd"] = kvswap::simd_level();
  info["path"] = path;
  auto probe = kvswap::probe_directory(path);
  info["problem"] = probe.is_ok() ? "" : probe.status().message();
  if (probe.is_ok()) {
    info["takes_direct"] = probe.value().takes_direct;
    info["alignment_bytes"] = probe.value().alignment_bytes;
    info["free_bytes"] = probe.value().free_bytes;
    info["fallbacks"] = probe.value().fallbacks;
  }
  return info;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "kvswap_torch's session: csrc/torch/session.h documents every call.";
  kvswap::register_errors();
  bind_options(module);
  bind_session(module);
  kvswap::bind_probe(module);
  module.def("system_info", &system_info, py::arg("path"),
             "What this machine and a folder on it offer, by name.");
}
