#include <torch/csrc/utils/pybind.h>

#include "io/host_info.h"
#include "kernels/cpu_features.h"
#include "python/errors.h"
#include "python/probe.h"
#include "torch/session.h"

namespace py = pybind11;
using kvswap::Session;
using kvswap::SessionOptions;

namespace {

void bind_options(py::module_& module) {
  py::class_<SessionOptions>(module, "SessionOptions")
      .def(py::init<>())
      .def_readwrite("layers", &SessionOptions::layers)
      .def_readwrite("heads", &SessionOptions::heads)
      .def_readwrite("kv_heads", &SessionOptions::kv_heads)
      .def_readwrite("head_dim", &SessionOptions::head_dim)
      .def_readwrite("dtype", &SessionOptions::dtype)
      .def_readwrite("device", &SessionOptions::device)
      .def_readwrite("directory", &SessionOptions::directory)
      .def_readwrite("io_mode", &SessionOptions::io_mode)
      .def_readwrite("reader", &SessionOptions::reader)
      .def_readwrite("device_model", &SessionOptions::device_model)
      .def_readwrite("read_depth", &SessionOptions::read_depth)
      .def_readwrite("merge_gap_bytes", &SessionOptions::merge_gap_bytes)
      .def_readwrite("merge_bytes_max", &SessionOptions::merge_bytes_max)
      .def_readwrite("disk_quota_bytes", &SessionOptions::disk_quota_bytes)
      .def_readwrite("checksum", &SessionOptions::checksum)
      .def_readwrite("group_tokens", &SessionOptions::group_tokens)
      .def_readwrite("ranks", &SessionOptions::ranks)
      .def_readwrite("summary_dtype", &SessionOptions::summary_dtype)
      .def_readwrite("groups_max", &SessionOptions::groups_max)
      .def_readwrite("pages_max", &SessionOptions::pages_max)
      .def_readwrite("sink_tokens", &SessionOptions::sink_tokens)
      .def_readwrite("tail_tokens", &SessionOptions::tail_tokens)
      .def_readwrite("replacement", &SessionOptions::replacement)
      .def_readwrite("select_queries_max", &SessionOptions::select_queries_max)
      .def_readwrite("kv_memory_bytes", &SessionOptions::kv_memory_bytes)
      .def_readwrite("max_context", &SessionOptions::max_context)
      .def_readwrite("max_batch", &SessionOptions::max_batch)
      .def_readwrite("timeline_spans", &SessionOptions::timeline_spans);
}

void bind_session(py::module_& module) {
  // Reads, packing and attention need no interpreter.
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Session>(module, "Session")
      .def(py::init<const SessionOptions&>(), py::arg("options"), Released())
      .def_static("memory_need", &Session::memory_need, py::arg("options"), py::arg("batch"),
                  py::arg("context"), py::arg("alignment_bytes") = 512)
      .def("declare", &Session::declare, py::arg("valid"), Released())
      .def("look_ahead", &Session::look_ahead, py::arg("layer"), py::arg("query"), Released())
      .def("override_selection", &Session::override_selection, py::arg("layer"), py::arg("groups"))
      .def("append", &Session::append, py::arg("layer"), py::arg("keys"), py::arg("values"),
           Released())
      .def("attend", &Session::attend, py::arg("layer"), py::arg("query"), py::arg("keys"),
           py::arg("values"), py::arg("scale"), Released())
      .def("extend", &Session::extend, py::arg("layer"), py::arg("query"), py::arg("keys"),
           py::arg("values"), py::arg("scale"), Released())
      .def("set_projection", &Session::set_projection, py::arg("layer"), py::arg("key_projection"),
           py::arg("query_projection"), Released())
      .def("needs_projection", &Session::needs_projection, py::arg("layer"))
      .def("read_back", &Session::read_back, py::arg("layer"), py::arg("begin"), py::arg("end"),
           Released())
      .def("last_selection", &Session::last_selection, py::arg("layer"))
      .def("select_sequences", &Session::select_sequences, py::arg("indices"), Released())
      .def("crop", &Session::crop, py::arg("columns"), Released())
      .def("reset", &Session::reset, Released())
      .def("close", &Session::close, Released())
      .def("columns", &Session::columns, py::arg("layer"))
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
