#include "python/probe.h"

#include <string>
#include <tuple>
#include <utility>

#include "io/probe.h"
#include "kvswap/engine_calls.h"

namespace py = pybind11;

namespace kvswap {
namespace {

template <typename T>
T value_of(Result<T> result) {
  if (!result.is_ok()) throw_status(result.status());
  return std::move(result.value());
}

}  // namespace

void bind_probe(py::module_& module) {
  // Each call is short; the interpreter looks for a Ctrl-C between two of them.
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<DiskProbe>(module, "DiskProbe")
      .def(py::init(
               [](const std::string& directory, const std::string& device, int64_t scratch_bytes) {
                 // Not as a call guard: pybind11 registers the new object inside of it.
                 const py::gil_scoped_release released;
                 return value_of(DiskProbe::open({directory, device, scratch_bytes}));
               }),
           py::arg("directory"), py::arg("device"), py::arg("scratch_bytes"))
      .def(
          "fill",
          [](DiskProbe& probe) {
            const ProbeFill fill = value_of(probe.fill());
            return std::pair(fill.bytes, fill.seconds);
          },
          Released())
      .def(
          "sync", [](DiskProbe& probe) { return value_of(probe.sync()); }, Released())
      .def(
          "measure",
          [](DiskProbe& probe, int64_t block_bytes, int depth, double seconds) {
            const ProbeCell cell = value_of(probe.measure(block_bytes, depth, seconds));
            return std::tuple(cell.bytes_per_second, cell.latency_seconds,
                              cell.latency_p99_seconds);
          },
          py::arg("block_bytes"), py::arg("depth"), py::arg("seconds"), Released())
      .def("close", &DiskProbe::close, Released())
      .def_property_readonly("filled_bytes", &DiskProbe::filled_bytes)
      .def_property_readonly("direct", [](const DiskProbe& p) { return p.facts().direct; })
      .def_property_readonly("in_memory", [](const DiskProbe& p) { return p.facts().in_memory; })
      .def_property_readonly("alignment_bytes",
                             [](const DiskProbe& p) { return p.facts().alignment_bytes; })
      .def_property_readonly("reader", [](const DiskProbe& p) { return p.facts().reader; })
      .def_property_readonly("fallbacks", [](const DiskProbe& p) { return p.facts().fallbacks; });
}

}  // namespace kvswap
