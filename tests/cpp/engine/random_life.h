#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "small_options.h"

namespace kvswap {

/// Settings that random lives are led with.
struct Shape {
  const char* name;
  int64_t group_tokens, tail_tokens, sink_tokens, groups_max, pages_max, queries_max, batch_max;
  const char* replacement = "fifo";
  DType dtype = DType::kFloat32;
  const char* heads = "all";
  const char* records = "model";
  int64_t layers = 2;
  int64_t resident_layers = 0;  // 0: all
  bool has_narrow_values = false;
};

inline void PrintTo(const Shape& shape, std::ostream* stream) { *stream << shape.name; }

inline EngineOptions options_of(const Shape& shape, const std::string& directory) {
  EngineOptions options = small_options(directory, shape.group_tokens);
  options.tail_tokens = shape.tail_tokens;
  options.sink_tokens = shape.sink_tokens;
  options.groups_max = shape.groups_max;
  options.pages_max = shape.pages_max;
  options.select_queries_max = shape.queries_max;
  options.replacement = shape.replacement;
  options.dtype = shape.dtype;
  options.heads = shape.heads;
  if (shape.dtype == DType::kBFloat16) options.head_dim *= 2;
  if (options.heads == "each") options.head_dim *= 2;
  options.records = shape.records;
  if (options.has_float8_records()) options.head_dim *= 4;
  if (options.has_int4_records()) options.head_dim = (4 * options.head_dim + 15) / 16 * 16;
  if (shape.has_narrow_values) {
    options.value_dim = options.has_int4_records() ? options.head_dim : options.head_dim + 3;
    options.head_dim *= 2;
  }
  options.layers = shape.layers;
  while (ssize(options.ranks) < shape.layers) options.ranks.push_back(6);
  if (shape.resident_layers > 0) options.resident_layers = shape.resident_layers;
  return options;
}

inline const Shape kShapes[] = {
    Shape{"usual", 4, 8, 4, 4, 8, 4, 3},
    Shape{"no_tail", 4, 0, 4, 4, 8, 4, 2},
    Shape{"tail_below_a_group", 8, 5, 3, 2, 3, 3, 2},
    Shape{"no_sinks_no_tail", 2, 0, 0, 3, 5, 2, 3},
    Shape{"one_page", 4, 4, 2, 1, 1, 1, 3},
    Shape{"no_reuse", 3, 7, 5, 6, 6, 4, 2, "lru"},
    Shape{"groups_of_one", 1, 3, 2, 7, 9, 3, 2, "unused"},
    Shape{"odd_groups", 7, 12, 9, 2, 4, 4, 4, "lru"},
    Shape{"groups_of_64", 64, 32, 4, 1, 2, 2, 2},
    Shape{"one_query", 4, 6, 1, 3, 4, 1, 2, "unused"},
    Shape{"long_sinks", 4, 16, 70, 2, 4, 4, 2},
    Shape{"everything_fits", 4, 8, 4, 400, 400, 4, 2},
    Shape{"bfloat16", 4, 8, 4, 4, 8, 4, 3, "fifo", DType::kBFloat16},
    Shape{"each_head", 4, 8, 4, 4, 8, 4, 3, "lru", DType::kFloat32, "each"},
    Shape{"each_head_no_tail", 7, 0, 9, 2, 5, 4, 3, "fifo", DType::kBFloat16, "each"}};

inline const Shape kSharedPages[] = {
    Shape{"five_layers_in_two", 4, 8, 4, 4, 8, 4, 3, "fifo", DType::kFloat32, "all", "model", 5, 2},
    Shape{"six_layers_in_three", 8, 5, 3, 2, 3, 3, 2, "lru", DType::kFloat32, "all", "model", 6, 3},
    Shape{"pages_for_every_crop", 2, 0, 0, 9, 20, 2, 3, "unused", DType::kFloat32, "all", "model",
          4, 3},
    Shape{"everything_fits", 4, 8, 4, 400, 400, 4, 2, "none", DType::kFloat32, "all", "model", 3,
          2},
    Shape{"each_head", 4, 8, 4, 4, 8, 4, 3, "lru", DType::kFloat32, "each", "model", 4, 2},
    Shape{"as_many_as_layers", 4, 8, 4, 4, 8, 4, 3, "fifo", DType::kFloat32, "all", "model", 3, 4}};

/// V narrower than K: in host memory alone.
inline const Shape kNarrowValues[] = {
    Shape{"narrow", 4, 8, 4, 4, 8, 4, 3, "lru", DType::kFloat32, "all", "model", 2, 0, true},
    Shape{"narrow_of_each_head", 7, 5, 9, 2, 5, 4, 3, "fifo", DType::kBFloat16, "each", "model", 3,
          2, true},
    Shape{"narrow_float8", 4, 8, 4, 4, 8, 4, 3, "lru", DType::kFloat32, "all", "fp8", 3, 2, true},
    Shape{"narrow_int4", 7, 12, 9, 2, 4, 4, 4, "lru", DType::kFloat32, "all", "int4", 2, 0, true}};

/// Of records that are rounded.
inline std::vector<Shape> rounded_shapes(const char* records) {
  return {
      Shape{"usual", 4, 8, 4, 4, 8, 4, 3, "fifo", DType::kFloat32, "all", records},
      // Groups of 16 are wide enough on disk with rows whose products bfloat16 holds exactly.
      Shape{"bfloat16", 16, 8, 4, 4, 8, 4, 3, "lru", DType::kBFloat16, "all", records},
      Shape{"no_sinks_no_tail", 2, 0, 0, 3, 5, 2, 3, "fifo", DType::kFloat32, "all", records},
      Shape{"odd_groups", 7, 12, 9, 2, 4, 4, 4, "lru", DType::kFloat32, "all", records},
      Shape{"long_sinks", 4, 16, 70, 2, 4, 4, 2, "fifo", DType::kFloat32, "all", records},
      Shape{"everything_fits", 4, 8, 4, 400, 400, 4, 2, "fifo", DType::kFloat32, "all", records},
      Shape{"each_head", 4, 8, 4, 4, 8, 4, 3, "lru", DType::kFloat32, "each", records},
      Shape{"shared_pages", 4, 8, 4, 4, 8, 4, 3, "fifo", DType::kFloat32, "all", records, 5, 2}};
}

}  // namespace kvswap
