#include "python/budget.h"

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kvswap/budget.h"
#include "kvswap/cache_options.h"

namespace py = pybind11;

namespace kvswap {
namespace {

using Uses = std::map<std::string, int64_t>;
/// What a budget decides: rank, groups_max, pages_max, summary_dtype, resident_layers, keep_tokens.
using Sizes = std::tuple<Rank, int64_t, int64_t, std::string, std::optional<int64_t>, int64_t>;

Sizes sizes_of(const Settings& settings) {
  return {settings.rank,          settings.groups_max,      settings.pages_max,
          settings.summary_dtype, settings.resident_layers, settings.keep_tokens};
}

/// need(*Sizes) returns bytes by use.
Need need_of(const py::function& need) {
  return [&need](const Settings& settings, int64_t, int64_t) {
    return std::apply(need, sizes_of(settings)).cast<Uses>();
  };
}

/// By dtype of the summary, (columns, missed).
using Missed = std::map<std::string, std::vector<std::pair<int64_t, double>>>;

Missed missed_by_dtype() {
  Missed missed;
  for (const MissedByRows& of : missed_by_rows()) {
    for (const MissedByColumns& each : of.by_columns) {
      missed[of.summary_dtype].emplace_back(each.columns, each.missed);
    }
  }
  return missed;
}

}  // namespace

void bind_budget(py::module_& module) {
  py::class_<Request>(module, "Request")
      .def(py::init([](int64_t bytes, int64_t context, int64_t batch) {
             return Request{bytes, context, batch};
           }),
           py::arg("kv_memory_bytes"), py::arg("context"), py::arg("batch"));
  module.def(
      "fit_budget",
      [](const CacheOptions& options, const Request& request, const py::function& need,
         bool may_share, bool keeps_columns) {
        const Lowering how = {.may_share = may_share, .keeps_columns = keeps_columns};
        return sizes_of(fit_budget(request, options.shape, options.settings, need_of(need), how));
      },
      py::arg("options"), py::arg("request"), py::arg("need"), py::arg("may_share") = false,
      py::arg("keeps_columns") = false);
  module.def(
      "spend_budget",
      [](const CacheOptions& options, const Request& request, const py::function& need,
         bool on_device, std::optional<int64_t> rank_max) {
        return sizes_of(spend_budget(request, options.shape, options.settings, need_of(need),
                                     on_device, rank_max));
      },
      py::arg("options"), py::arg("request"), py::arg("need"), py::arg("on_device") = false,
      py::arg("rank_max") = py::none());
  module.def(
      "too_small",
      [](const CacheOptions& options, const Request& request, const Uses& need) {
        return too_small(request, need, options.settings);
      },
      py::arg("options"), py::arg("request"), py::arg("need"));
  module.def(
      "effective_ranks",
      [](const CacheOptions& options) {
        return effective_ranks(options.settings, options.shape, options.is_calibrated);
      },
      py::arg("options"));
  module.def("missed_by_columns", &missed_by_dtype);
  module.def("missed_by_tokens", &missed_by_tokens, py::arg("tokens"), py::arg("context"));
  module.def("length_factor", &length_factor, py::arg("context"));
}

}  // namespace kvswap
