#include <torch/csrc/utils/pybind.h>

#include "io/host_info.h"
#include "kernels/cpu_features.h"
#include "kvswap/settings_rules.h"
#include "python/budget.h"
#include "python/clusters.h"
#include "python/errors.h"
#include "python/probe.h"
#include "python/projection.h"
#include "python/released.h"
#include "python/replay.h"
#include "python/saved.h"
#include "torch/element_type.h"
#include "torch/expanded_queries.h"
#include "torch/tensor_cache.h"

namespace py = pybind11;
using kvswap::Budget;
using kvswap::Cache;
using kvswap::CacheOptions;
using kvswap::EstimateFrom;
using kvswap::FreeInterpreter;
using kvswap::GroupChoice;
using kvswap::LayerState;
using kvswap::ModelShape;
using kvswap::Pass;
using kvswap::Report;
using kvswap::SavedCache;
using kvswap::TensorCache;
using kvswap::TokenImportance;

namespace {

/// A property for a member of a member.
template <typename Inner, typename T>
void bind_inner(py::class_<CacheOptions>& options, const char* name, Inner CacheOptions::* inner,
                T Inner::* member) {
  options.def_property(
      name, [=](const CacheOptions& self) { return self.*inner.*member; },
      [=](CacheOptions& self, const T& value) { self.*inner.*member = value; });
}

/// Every setting of the table, and what else a session is made of, as properties of one object.
void bind_options(py::module_& module) {
  py::class_<CacheOptions> options(module, "CacheOptions");
  options.def(py::init<>())
      .def_readwrite("is_calibrated", &CacheOptions::is_calibrated)
      .def_readwrite("ranks", &CacheOptions::ranks)
      .def_readwrite("directory", &CacheOptions::directory)
      .def_readwrite("device", &CacheOptions::device)
      .def_readwrite("timeline_spans", &CacheOptions::timeline_spans)
      .def_readwrite("tells_attention", &CacheOptions::tells_attention)
      .def_property(
          "dtype", [](const CacheOptions& self) { return kvswap::scalar_type(self.shape.dtype); },
          [](CacheOptions& self, at::ScalarType type) {
            self.shape.dtype = kvswap::element_type(type);
          });
  bind_inner(options, "layers", &CacheOptions::shape, &ModelShape::layers);
  bind_inner(options, "query_heads", &CacheOptions::shape, &ModelShape::heads);
  bind_inner(options, "kv_heads", &CacheOptions::shape, &ModelShape::kv_heads);
  bind_inner(options, "head_dim", &CacheOptions::shape, &ModelShape::head_dim);
  bind_inner(options, "sides", &CacheOptions::shape, &ModelShape::sides);
  bind_inner(options, "value_dim", &CacheOptions::shape, &ModelShape::value_dim);
  bind_inner(options, "kv_memory_bytes", &CacheOptions::budget, &Budget::kv_memory_bytes);
  bind_inner(options, "max_context", &CacheOptions::budget, &Budget::max_context);
  bind_inner(options, "max_batch", &CacheOptions::budget, &Budget::max_batch);
  kvswap::visit_settings([&](const char* name, auto member, const auto&) {
    bind_inner(options, name, &CacheOptions::settings, member);
  });
}

/// A method of the Cache below, which needs no tensors.
template <typename Result, typename... Args>
auto below(Result (Cache::*method)(Args...)) {
  return [method](TensorCache& self, Args... args) -> Result {
    return (self.cache().*method)(std::forward<Args>(args)...);
  };
}
template <typename Result, typename... Args>
auto below(Result (Cache::*method)(Args...) const) {
  return [method](const TensorCache& self, Args... args) -> Result {
    return (self.cache().*method)(std::forward<Args>(args)...);
  };
}

/// A field of what a method of the Cache returns.
template <auto kField>
auto of_report(const TensorCache& self) {
  return self.cache().report().*kField;
}
template <auto kField>
auto of_layer(const TensorCache& self, int64_t layer) {
  return self.cache().layer(layer).*kField;
}

/// A signal's handler runs, and may raise, while a call waits for the disk.
bool has_signal() {
  const py::gil_scoped_acquire held;
  return PyErr_CheckSignals() != 0;
}

std::unique_ptr<TensorCache> open_cache(CacheOptions options) {
  // Not as a call guard: pybind11 registers the new object inside of it.
  const py::gil_scoped_release released;
  options.shall_end = has_signal;
  return std::make_unique<TensorCache>(options);
}

std::unique_ptr<TensorCache> open_saved(CacheOptions options, const SavedCache& saved) {
  const py::gil_scoped_release released;
  options.shall_end = has_signal;
  return std::make_unique<TensorCache>(saved, options);
}

/// estimate(layer, keys, query, valid, rank) returns the key and the query matrix.
void set_estimate(TensorCache& cache, py::function estimate) {
  // Copied and freed by threads that do not hold the interpreter.
  const std::shared_ptr<py::function> kept(new py::function(std::move(estimate)),
                                           [](py::function* function) {
                                             const py::gil_scoped_acquire held;
                                             delete function;
                                           });
  cache.set_estimate([kept](const EstimateFrom& from) {
    const py::gil_scoped_acquire held;
    return (*kept)(from.layer, from.keys, from.query, from.valid, from.rank)
        .cast<std::pair<at::Tensor, at::Tensor>>();
  });
}

Pass pass_named(const std::string& name) {
  if (name == "prefill") return Pass::kPrefill;
  if (name == "decode") return Pass::kDecode;
  throw py::value_error("begin_pass: a pass must be prefill or decode, got " + name);
}

void bind_tensor_calls(py::class_<TensorCache>& cache) {
  // Reads, packing and attention need no interpreter.
  using Released = py::call_guard<FreeInterpreter>;
  cache
      .def(
          "begin_pass",
          [](TensorCache& self, const std::string& pass, const std::optional<at::Tensor>& valid) {
            self.begin_pass(pass_named(pass), valid);
          },
          py::arg("kind"), py::arg("valid") = py::none(), Released())
      .def("declare_held", &TensorCache::declare_held, py::arg("valid"), Released())
      .def("look_ahead",
           py::overload_cast<int64_t, const at::Tensor&, std::optional<double>, int64_t>(
               &TensorCache::look_ahead),
           py::arg("layer"), py::arg("query"), py::arg("scale") = py::none(),
           py::arg("predicting_since_ns") = 0, Released())
      .def("set_estimate", &set_estimate, py::arg("estimate"))
      .def("give_scores", &TensorCache::give_scores, py::arg("layer"), py::arg("scores"),
           Released())
      .def(
          "give_worth",
          [](TensorCache& self, int64_t layer, const at::Tensor& worth,
             const std::optional<at::Tensor>& decay) { self.give_worth(layer, worth, decay); },
          py::arg("layer"), py::arg("worth"), py::arg("decay") = py::none(), Released())
      .def(
          "replace_worth",
          [](TensorCache& self, int64_t layer, const at::Tensor& worth,
             const std::optional<at::Tensor>& decay) {
            self.give_worth(layer, worth, decay, TokenImportance::Of::kAll);
          },
          py::arg("layer"), py::arg("worth"), py::arg("decay") = py::none(), Released())
      .def("append", &TensorCache::append, py::arg("layer"), py::arg("keys"), py::arg("values"),
           Released())
      .def(
          "attend",
          [](TensorCache& self, int64_t layer, const at::Tensor& query, double scale,
             double softcap, const std::optional<at::Tensor>& sinks) {
            return self.attend(layer, query, scale, {softcap, sinks});
          },
          py::arg("layer"), py::arg("query"), py::arg("scale"), py::arg("softcap") = 0.0,
          py::arg("sinks") = py::none(), Released())
      .def(
          "attend_weighed",
          [](TensorCache& self, int64_t layer, const at::Tensor& query, double scale,
             double softcap, const std::optional<at::Tensor>& sinks) {
            return self.attend_weighed(layer, query, scale, {softcap, sinks});
          },
          py::arg("layer"), py::arg("query"), py::arg("scale"), py::arg("softcap") = 0.0,
          py::arg("sinks") = py::none(), Released())
      .def(
          "extend",
          [](TensorCache& self, int64_t layer, const at::Tensor& query, const at::Tensor& keys,
             const at::Tensor& values, double scale, double softcap,
             const std::optional<at::Tensor>& sinks) {
            return self.extend(layer, query, keys, values, scale, {softcap, sinks});
          },
          py::arg("layer"), py::arg("query"), py::arg("keys"), py::arg("values"), py::arg("scale"),
          py::arg("softcap") = 0.0, py::arg("sinks") = py::none(), Released())
      .def(
          "extend_expanded",
          [](TensorCache& self, int64_t layer, const at::Tensor& query, const at::Tensor& weight,
             int64_t unrotated, const at::Tensor& keys, double scale, double softcap,
             const std::optional<at::Tensor>& sinks, std::optional<bool> by_torch) {
            return self.extend_expanded(layer, {query, weight, unrotated, by_torch}, keys, scale,
                                        {softcap, sinks});
          },
          py::arg("layer"), py::arg("query"), py::arg("weight"), py::arg("unrotated"),
          py::arg("keys"), py::arg("scale"), py::arg("softcap") = 0.0,
          py::arg("sinks") = py::none(), py::arg("by_torch") = py::none(), Released())
      .def("set_projection", &TensorCache::set_projection, py::arg("layer"),
           py::arg("key_projection"), py::arg("query_projection"), Released())
      .def("read_back", &TensorCache::read_back, py::arg("layer"), py::arg("begin"), py::arg("end"),
           Released());
}

void bind_plain_calls(py::class_<TensorCache>& cache) {
  using Released = py::call_guard<FreeInterpreter>;
  cache
      .def(
          "wants_look_ahead",
          [](const TensorCache& self, int64_t layer, int64_t tokens) {
            return static_cast<int>(self.cache().wants_look_ahead(layer, tokens));
          },
          py::arg("layer"), py::arg("tokens"))
      .def(
          "read_ahead",
          [](TensorCache& self, int64_t layer, int64_t tokens) {
            self.cache().look_ahead(layer, {.tokens = tokens});
          },
          py::arg("layer"), py::arg("tokens"), Released())
      .def(
          "override_selection",
          [](TensorCache& self, int64_t layer, std::vector<std::vector<int64_t>> groups,
             std::vector<std::vector<int64_t>> predicted) {
            self.cache().give(layer, GroupChoice{std::move(groups), std::move(predicted)});
          },
          py::arg("layer"), py::arg("groups"),
          py::arg("predicted") = std::vector<std::vector<int64_t>>(), Released())
      .def(
          "give_tokens",
          [](TensorCache& self, int64_t layer, std::vector<std::vector<int64_t>> positions) {
            kvswap::give_tokens(self.cache(), layer, {std::move(positions)});
          },
          py::arg("layer"), py::arg("positions"), Released())
      .def(
          "needs_scores",
          [](const TensorCache& self, int64_t layer, int64_t queries) {
            return self.cache().layer(layer, queries).needs_scores;
          },
          py::arg("layer"), py::arg("queries"))
      .def("needs_projection", &of_layer<&LayerState::needs_projection>, py::arg("layer"))
      .def("attends_all", &of_layer<&LayerState::attends_all>, py::arg("layer"))
      .def("positions", &of_layer<&LayerState::positions>, py::arg("layer"))
      .def("last_selection", below(&Cache::last_selection), py::arg("layer"), Released())
      .def(
          "select_sequences",
          [](TensorCache& self, const std::vector<int64_t>& indices) {
            self.cache().select_sequences(indices);
          },
          py::arg("indices"), Released())
      .def("crop", below(&Cache::crop), py::arg("positions"), Released())
      .def("reset", below(&Cache::reset), Released())
      .def("divide", below(&Cache::divide), py::arg("options"), Released())
      .def(
          "close", [](TensorCache& self) { self.cache().close(); }, Released())
      .def("common_positions",
           [](const TensorCache& self) { return self.cache().held().positions; })
      .def("batch", [](const TensorCache& self) { return self.cache().held().batch; })
      .def("counters", &of_report<&Report::counters>)
      .def("facts", &of_report<&Report::facts>)
      .def("ledger", &of_report<&Report::ledger>)
      .def("timeline", below(&Cache::timeline), Released());
}

void bind_cache(py::module_& module) {
  py::class_<TensorCache> cache(module, "TensorCache");
  kvswap::bind_saved(module, cache);
  cache.def(py::init(&open_cache), py::arg("options"))
      .def(py::init(&open_saved), py::arg("options"), py::arg("saved"));
  bind_tensor_calls(cache);
  bind_plain_calls(cache);
  module.def(
      "memory_need",
      py::overload_cast<const CacheOptions&, int64_t, int64_t, int64_t>(&kvswap::memory_need),
      py::arg("options"), py::arg("batch"), py::arg("context"), py::arg("alignment_bytes") = 512);
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
  module.doc() =
      "kvswap_torch's cache: csrc/torch/tensor_cache.h and csrc/kvswap/cache.h document every "
      "call.";
  // Tensors become Python's only where torch's own module is there.
  py::module_::import("torch");
  kvswap::register_errors();
  bind_options(module);
  bind_cache(module);
  kvswap::bind_probe(module);
  kvswap::bind_clusters(module);
  kvswap::bind_projection(module);
  kvswap::bind_budget(module);
  kvswap::bind_replay(module);
  module.def("system_info", &system_info, py::arg("path"),
             "What this machine and a folder on it offer, by name.");
  module.def("simd_levels", &kvswap::simd_levels);
  module.def("use_simd_level", &kvswap::use_simd_level, py::arg("name"));
}
