#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

#include "engine/engine_options.h"

namespace kvswap {

/// The value that a setting's word stands for; throws std::invalid_argument for another word.
template <typename T>
T parse_word(const char* field, const std::string& word,
             std::initializer_list<std::pair<const char*, T>> words) {
  std::string known;
  for (const auto& [name, parsed] : words) {
    if (word == name) return parsed;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  throw std::invalid_argument("session: " + std::string(field) + " must be one of " + known +
                              ", got '" + word + "'");
}

/// What Settings and SessionOptions call by the same names, to an engine's options whose dtype is
/// set. Throws as parse_word().
template <typename From>
void copy_engine_fields(const From& from, EngineOptions& to) {
  to.file.mode = parse_word<IoMode>(
      "io_mode", from.io_mode,
      {{"auto", IoMode::kAuto}, {"direct", IoMode::kDirect}, {"buffered", IoMode::kBuffered}});
  to.reader.kind = parse_word<ReaderKind>("reader", from.reader,
                                          {{"auto", ReaderKind::kAuto},
                                           {"uring", ReaderKind::kUring},
                                           {"threads", ReaderKind::kThreads},
                                           {"sync", ReaderKind::kSync}});
  to.reader.depth = static_cast<int>(from.read_depth);
  to.merge_gap_bytes = from.merge_gap_bytes;
  to.merge_bytes_max = from.merge_bytes_max;
  to.checksum = from.checksum;
  to.group_tokens = from.group_tokens;
  to.summary_dtype = parse_word<DType>("summary_dtype", from.summary_dtype,
                                       {{"model", to.dtype}, {"int8", DType::kInt8}});
  to.groups_max = from.groups_max;
  to.pages_max = from.pages_max;
  to.sink_tokens = from.sink_tokens;
  to.tail_tokens = from.tail_tokens;
  to.replacement = parse_word<Replacement>("replacement", from.replacement,
                                           {{"fifo", Replacement::kFifo},
                                            {"lru", Replacement::kLru},
                                            {"unused", Replacement::kUnused},
                                            {"none", Replacement::kNone}});
  to.select_queries_max = from.select_queries_max;
}

}  // namespace kvswap
