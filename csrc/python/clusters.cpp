
#include "python/clusters.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "methods/clusters/adaptive_clusters.h"
#include "torch/parallel.h"

namespace py = pybind11;

namespace kvswap {
namespace {

KeyRows rows_of(const AdaptiveClusters& row, const at::Tensor& keys, int64_t end) {
  const int64_t width = row.table().width();
  const int64_t most = static_cast<int64_t>(row.table().place().size());
  TORCH_CHECK(keys.dim() == 2 && keys.size(1) == width && keys.scalar_type() == at::kFloat &&
                  keys.device().is_cpu() && keys.stride(1) == 1,
              "clusters: keys must be [tokens, ", width, "] fp32 in the CPU's memory, got ",
              keys.sizes(), " ", keys.scalar_type());
  TORCH_CHECK(0 <= end && end <= std::min(keys.size(0), most),
              "clusters: end must be at most the tokens that there are keys and room for (",
              keys.size(0), " and ", most, "), got ", end);
  return {.data = keys.const_data_ptr<float>(), .width = width, .stride = keys.stride(0)};
}

void check_cluster(const AdaptiveClusters& row, int64_t cluster) {
  const int64_t count = row.table().count();
  TORCH_CHECK_INDEX(0 <= cluster && cluster < count,
                    "clusters: it must be one of the clusters that there are (", count, "), got ",
                    cluster);
}

template <typename T>
at::Tensor tensor_of(std::span<const T> numbers, at::ScalarType type) {
  at::Tensor found = at::empty({static_cast<int64_t>(numbers.size())}, type);
  std::copy(numbers.begin(), numbers.end(), found.mutable_data_ptr<T>());
  return found;
}

at::Tensor centroids_of(const AdaptiveClusters& row) {
  const ClusterTable& table = row.table();
  at::Tensor found = at::empty({table.count(), table.width()}, at::kFloat);
  for (int64_t c = 0; c < table.count(); ++c) {
    table.centroid(c, {found.mutable_data_ptr<float>() + c * table.width(),
                       static_cast<size_t>(table.width())});
  }
  return found;
}

std::unique_ptr<AdaptiveClusters> make(int64_t width, int64_t tokens_max,
                                       const ClusterOptions& options) {
  TORCH_CHECK_VALUE(width > 0 && tokens_max > 0,
                    "clusters: width and tokens_max must be positive, got ", width, " and ",
                    tokens_max);
  const std::string fault = options.fault();
  TORCH_CHECK_VALUE(fault.empty(), "clusters: ", fault);
  return std::make_unique<AdaptiveClusters>(width, tokens_max, options);
}

}  // namespace

void bind_clusters(py::module_& module) {
  py::class_<AdaptiveClusters>(module, "Clusters")
      .def(py::init([](int64_t width, int64_t tokens_max, int64_t cluster_tokens,
                       int64_t cluster_tokens_max, double split_factor, int64_t pending_tokens,
                       int64_t sink_tokens, int64_t block_tokens, const std::string& update) {
             const auto kind = parse_cluster_update(update);
             TORCH_CHECK_VALUE(kind,
                               "clusters: update must be one of adaptive, static, local, got '",
                               update, "'");
             return make(width, tokens_max,
                         {cluster_tokens, cluster_tokens_max, split_factor, pending_tokens,
                          sink_tokens, block_tokens, *kind});
           }),
           py::arg("width"), py::arg("tokens_max"), py::arg("cluster_tokens"),
           py::arg("cluster_tokens_max"), py::arg("split_factor"), py::arg("pending_tokens"),
           py::arg("sink_tokens"), py::arg("block_tokens") = 8192, py::arg("update") = "adaptive")
      .def(py::init<const AdaptiveClusters&>(), py::arg("other"))
      .def(
          "enter_prompt",
          [](AdaptiveClusters& row, const at::Tensor& keys, int64_t end) {
            const KeyRows rows = rows_of(row, keys, end);
            const py::gil_scoped_release released;
            row.enter_prompt(rows, end, {.parallel = &at_parallel_for()});
          },
          py::arg("keys"), py::arg("end"))
      .def(
          "enter",
          [](AdaptiveClusters& row, const at::Tensor& keys, int64_t end,
             const std::vector<int64_t>& read) {
            const KeyRows rows = rows_of(row, keys, end);
            for (const int64_t cluster : read) check_cluster(row, cluster);
            const py::gil_scoped_release released;
            return row.enter(rows, end, read);
          },
          py::arg("keys"), py::arg("end"), py::arg("read"))
      .def(
          "members",
          [](const AdaptiveClusters& row, int64_t cluster) {
            check_cluster(row, cluster);
            return members_of(row, cluster);
          },
          py::arg("cluster"))
      .def_property_readonly(
          "place",
          [](const AdaptiveClusters& row) { return tensor_of(row.table().place(), at::kInt); })
      .def_property_readonly(
          "size",
          [](const AdaptiveClusters& row) { return tensor_of(row.table().size(), at::kInt); })
      .def_property_readonly("variance",
                             [](const AdaptiveClusters& row) {
                               return tensor_of(row.table().variance(), at::kDouble);
                             })
      .def_property_readonly("centroid", &centroids_of)
      .def_property_readonly("count",
                             [](const AdaptiveClusters& row) { return row.table().count(); })
      .def_property_readonly("clusters_max",
                             [](const AdaptiveClusters& row) { return row.table().clusters_max(); })
      .def_property_readonly("left", &AdaptiveClusters::left)
      .def_property_readonly("pending",
                             [](const AdaptiveClusters& row) { return row.waiting().count(); })
      .def_property_readonly("threshold",
                             [](const AdaptiveClusters& row) { return row.threshold().variance; })
      .def_property_readonly("splits",
                             [](const AdaptiveClusters& row) { return row.counts().splits; })
      .def_property_readonly("refused",
                             [](const AdaptiveClusters& row) { return row.counts().refused; })
      .def_property_readonly("forced",
                             [](const AdaptiveClusters& row) { return row.counts().forced; });
}

}  // namespace kvswap
