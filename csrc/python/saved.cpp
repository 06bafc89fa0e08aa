#include "python/saved.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "io/failure.h"
#include "python/released.h"

namespace py = pybind11;

namespace kvswap {
namespace {

struct StoredType {
  const char* name;
  at::ScalarType type;
};

constexpr StoredType kTypes[] = {
    {"BOOL", at::kBool}, {"U8", at::kByte},    {"I8", at::kChar},  {"I16", at::kShort},
    {"I32", at::kInt},   {"I64", at::kLong},   {"F16", at::kHalf}, {"BF16", at::kBFloat16},
    {"F32", at::kFloat}, {"F64", at::kDouble},
};

using Tensors = std::map<std::string, at::Tensor>;

KeptTensor kept_of(const std::string& name, const at::Tensor& tensor) {
  for (const StoredType& stored : kTypes) {
    if (stored.type != tensor.scalar_type()) continue;
    return {.name = name,
            .dtype = stored.name,
            .shape = tensor.sizes().vec(),
            .bytes = {static_cast<const std::byte*>(tensor.data_ptr()), tensor.nbytes()}};
  }
  TORCH_CHECK_VALUE(false, "save: ", name, " must be of a dtype that safetensors has, got ",
                    tensor.scalar_type());
}

void save(TensorCache& cache, const std::string& path, bool overwrite, const std::string& facts,
          const Tensors& tensors) {
  Tensors plain;
  SaveArgs args = {.path = path, .overwrite = overwrite, .facts = facts};
  for (const auto& [name, tensor] : tensors) {
    plain[name] = tensor.detach().to(at::kCPU).contiguous();
    args.tensors.push_back(kept_of(name, plain[name]));
  }
  cache.cache().save(args);
}

/// Copies: what was read goes with the saved cache.
Tensors tensors_of(const SavedCache& saved) {
  Tensors tensors;
  for (const auto& [name, stored] : saved.tensors()) {
    for (const StoredType& known : kTypes) {
      if (known.name != stored.dtype) continue;
      at::Tensor tensor = at::empty(stored.shape, known.type);
      if (!stored.bytes.empty()) {
        std::memcpy(tensor.data_ptr(), stored.bytes.data(), stored.bytes.size());
      }
      tensors[name] = tensor;
    }
  }
  return tensors;
}

}  // namespace

void bind_saved(py::module_& module, py::class_<TensorCache>& cache) {
  using Released = py::call_guard<FreeInterpreter>;
  module.def(
      "failure_name", [](int error_number) { return failure_name(failure_of(error_number)); },
      py::arg("error_number"));
  py::class_<SavedCache, std::shared_ptr<SavedCache>>(module, "SavedCache")
      .def(py::init([](const std::string& path) {
             const py::gil_scoped_release released;
             return std::const_pointer_cast<SavedCache>(SavedCache::open(path));
           }),
           py::arg("path"))
      .def_property_readonly("path", &SavedCache::path)
      .def_property_readonly("manifest", &SavedCache::manifest)
      .def_property_readonly("facts", &SavedCache::facts)
      .def_property_readonly("tokens", &SavedCache::tokens)
      .def_property_readonly("sequences", &SavedCache::sequences)
      .def("tensors", &tensors_of)
      .def(
          "options",
          [](const SavedCache& saved, const std::string& directory,
             std::optional<int64_t> kv_memory_bytes, std::optional<int64_t> max_context,
             std::optional<int64_t> max_batch, int64_t timeline_spans) {
            const Budget budget = {kv_memory_bytes, max_context, max_batch};
            return saved.options(directory, budget, timeline_spans);
          },
          py::arg("directory"), py::arg("kv_memory_bytes") = py::none(),
          py::arg("max_context") = py::none(), py::arg("max_batch") = py::none(),
          py::arg("timeline_spans") = 0)
      .def("verify", &SavedCache::verify, Released())
      .def_static("remove", &SavedCache::remove, py::arg("path"));
  cache
      .def("save", &save, py::arg("path"), py::arg("overwrite"), py::arg("facts"),
           py::arg("tensors"), Released())
      .def("fork", [](TensorCache& self) {
        const py::gil_scoped_release released;
        return self.fork();
      });
}

}  // namespace kvswap
