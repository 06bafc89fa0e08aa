#include "python/projection.h"

#include <ATen/core/grad_mode.h>

#include <optional>
#include <string>

#include "torch/projection.h"

namespace py = pybind11;

namespace kvswap {

void bind_projection(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release, at::NoGradGuard>;
  module.def(
      "estimate_projection",
      [](const std::string& kind, const at::Tensor& keys, const std::optional<at::Tensor>& query,
         int64_t rank, const std::optional<at::Tensor>& valid, const std::string& score,
         const std::string& heads, int64_t rotary) {
        return estimate_projection(
            {.keys = keys, .query = query, .valid = valid, .rank = rank},
            {.kind = kind, .score = score, .heads = heads, .rotary = rotary});
      },
      py::arg("kind"), py::arg("keys"), py::arg("query"), py::arg("rank"), py::arg("valid"),
      py::arg("score"), py::arg("heads"), py::arg("rotary"), Released());
  module.def(
      "pair_from_moments",
      [](const std::string& kind, const at::Tensor& keys, const std::optional<at::Tensor>& queries,
         int64_t rank, std::pair<int64_t, int64_t> counts) {
        return pair_from_moments(
            kind, {keys, queries.value_or(at::Tensor()), counts.first, counts.second}, rank);
      },
      py::arg("kind"), py::arg("keys"), py::arg("queries"), py::arg("rank"), py::arg("counts"),
      Released());
  module.def("head_moment", &head_moment, py::arg("left"), py::arg("right"), py::arg("kv_heads"),
             Released());
  module.def("leading_svd", &leading_svd, py::arg("matrix"), py::arg("rank"), Released());
  module.def("kind_of_keys_alone", &kind_of_keys_alone, py::arg("kind"));
}

}  // namespace kvswap
