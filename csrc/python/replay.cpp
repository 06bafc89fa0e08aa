#include "python/replay.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "io/read_coalescing.h"
#include "memory/page_map.h"

namespace py = pybind11;

namespace kvswap {
namespace {

using Numbers = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

PageMap page_map_of(int32_t pages, const std::string& replacement) {
  const auto known = parse_replacement(replacement);
  if (!known || pages < 1) {
    throw py::value_error("PageMap: must have pages and a known replacement, got " +
                          std::to_string(pages) + " and '" + replacement + "'");
  }
  return PageMap(0, pages, *known);
}

/// keys: distinct, [count]. Returns which of them were loaded, [count] bool.
py::array_t<bool> plan(PageMap& map, const Numbers& keys) {
  const auto count = static_cast<size_t>(keys.size());
  if (count > static_cast<size_t>(map.pages())) {
    throw py::value_error("PageMap: must have a page for each of a step's " +
                          std::to_string(count) + " groups, got " + std::to_string(map.pages()));
  }
  const std::vector<uint64_t> wanted(keys.data(), keys.data() + count);
  std::vector<PageMap::Assignment> assignments(count);
  map.plan(wanted, assignments);
  py::array_t<bool> loads(static_cast<py::ssize_t>(count));
  bool* const is_load = loads.mutable_data();
  for (size_t i = 0; i < count; ++i) is_load[i] = assignments[i].is_load;
  return loads;
}

/// Bytes of each read that fetches records of one size at these distinct places, counted in records
/// from the file's beginning. Their pages are no neighbours.
std::vector<int64_t> merged_read_bytes(const Numbers& places, int64_t record_bytes,
                                       int64_t gap_bytes_max, int64_t merged_bytes_max) {
  static std::byte nowhere;  // nothing is read
  std::vector<Placement> placements;
  placements.reserve(static_cast<size_t>(places.size()));
  for (py::ssize_t i = 0; i < places.size(); ++i) {
    placements.push_back({places.data()[i] * record_bytes, record_bytes, &nowhere});
  }
  std::vector<int64_t> sorted(places.data(), places.data() + places.size());
  std::ranges::sort(sorted);
  if (std::ranges::adjacent_find(sorted) != sorted.end()) {
    throw py::value_error("merged_read_bytes: places must differ, got one twice");
  }
  MergedReads merged;
  merged.build(placements, {gap_bytes_max, merged_bytes_max, &nowhere});
  std::vector<int64_t> sizes;
  for (const BlockRead& read : merged.reads()) {
    sizes.push_back(0);
    for (const iovec& target : read.targets) sizes.back() += static_cast<int64_t>(target.iov_len);
  }
  return sizes;
}

}  // namespace

void bind_replay(py::module_& module) {
  py::class_<PageMap>(module, "PageMap")
      .def(py::init(&page_map_of), py::arg("pages"), py::arg("replacement"))
      .def("plan", &plan, py::arg("keys"))
      .def(
          "holds", [](const PageMap& map, uint64_t key) { return map.find(key) >= 0; },
          py::arg("key"));
  module.def("merged_read_bytes", &merged_read_bytes, py::arg("places"), py::arg("record_bytes"),
             py::arg("gap_bytes_max"), py::arg("merged_bytes_max"));
}

}  // namespace kvswap
