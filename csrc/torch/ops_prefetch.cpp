#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvswap/engine_calls.h"
#include "torch/op_checks.h"
#include "torch/record_prefetcher.h"

namespace kvswap {
namespace {

/// Open prefetchers by the number that their handle holds. One that is closed by one thread while
/// another waits in it lives until that call returns.
class Prefetchers {
 public:
  int64_t add(std::shared_ptr<RecordPrefetcher> made) {
    const std::lock_guard lock(mutex_);
    open_.emplace(next_, std::move(made));
    return next_++;
  }

  std::shared_ptr<RecordPrefetcher> find(const char* where, const at::Tensor& handle) {
    check_shape(where, "handle", handle, "[4]", {4});
    check_dtype(where, "handle", handle, at::kLong);
    const std::lock_guard lock(mutex_);
    const auto found = open_.find(handle.const_data_ptr<int64_t>()[0]);
    TORCH_CHECK_VALUE(found != open_.end(), where,
                      ": handle must be one of prefetch_open() that is not closed, got ",
                      handle.const_data_ptr<int64_t>()[0]);
    return found->second;
  }

  void remove(int64_t number) {
    std::shared_ptr<RecordPrefetcher> last;  // destroyed without the lock: it waits for the disk
    const std::lock_guard lock(mutex_);
    const auto found = open_.find(number);
    if (found == open_.end()) return;
    last = std::move(found->second);
    open_.erase(found);
  }

 private:
  std::mutex mutex_;
  int64_t next_ = 1;
  std::map<int64_t, std::shared_ptr<RecordPrefetcher>> open_;
};

Prefetchers& prefetchers() {
  static auto* all = new Prefetchers;  // never destroyed: threads may read while the process ends
  return *all;
}

template <typename T>
T value_of(Result<T> result) {
  throw_status(result.is_ok() ? Status::ok() : result.status());
  return std::move(result.value());
}

template <typename T>
T word_of(const char* name, c10::string_view word, std::optional<T> value, const char* words) {
  TORCH_CHECK_VALUE(value, "prefetch_open: ", name, " must be ", words, ", got '", word, "'");
  return *value;
}

at::Tensor prefetch_open(c10::string_view path, int64_t record_bytes, int64_t first_byte,
                         c10::string_view reader, c10::string_view io, int64_t depth) {
  check_range("prefetch_open", "record_bytes", record_bytes, 1, kIndexMax);
  TORCH_CHECK_VALUE(first_byte >= 0, "prefetch_open: first_byte must be at least 0, got ",
                    first_byte);
  check_range("prefetch_open", "depth", depth, 1, 1024);
  const std::string reader_word(reader), io_word(io);
  const PrefetcherOptions options{
      .path = std::string(path),
      .record_bytes = record_bytes,
      .first_byte = first_byte,
      .reader =
          word_of("reader", reader, parse_reader_kind(reader_word), "auto, uring, threads or sync"),
      .mode = word_of("io", io, parse_io_mode(io_word), "auto, direct or buffered"),
      .depth = static_cast<int>(depth)};
  std::shared_ptr<RecordPrefetcher> made = value_of(RecordPrefetcher::open(options));
  at::Tensor handle = at::empty({4}, at::kLong);
  auto* facts = handle.data_ptr<int64_t>();
  facts[1] = made->record_bytes();
  facts[2] = made->records();
  facts[3] = made->is_direct() ? 1 : 0;
  facts[0] = prefetchers().add(std::move(made));
  return handle;
}

at::Tensor prefetch_submit(const at::Tensor& handle, const at::Tensor& records) {
  const auto prefetcher = prefetchers().find("prefetch_submit", handle);
  check_shape("prefetch_submit", "records", records, "[count]", {-1});
  check_dtype("prefetch_submit", "records", records, at::kLong);
  const at::Tensor wanted = records.contiguous();
  const auto* first = wanted.const_data_ptr<int64_t>();
  at::Tensor ticket = at::empty({}, at::kLong);
  *ticket.data_ptr<int64_t>() =
      value_of(prefetcher->submit(std::vector<int64_t>(first, first + wanted.numel())));
  return ticket;
}

at::Tensor prefetch_wait(const at::Tensor& handle, const at::Tensor& ticket, at::IntArrayRef shape,
                         at::ScalarType dtype) {
  const auto prefetcher = prefetchers().find("prefetch_wait", handle);
  check_shape("prefetch_wait", "ticket", ticket, "[]", {});
  check_dtype("prefetch_wait", "ticket", ticket, at::kLong);
  const int64_t number = *ticket.const_data_ptr<int64_t>();
  const int64_t count = value_of(prefetcher->count_of(number));
  int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : shape) {
    check_range("prefetch_wait", "sizes of shape", size, 0, kIndexMax);
    bytes *= size;
  }
  TORCH_CHECK_VALUE(
      !shape.empty() && shape[0] == count && bytes == count * prefetcher->record_bytes(),
      "prefetch_wait: shape must be of the ticket's ", count, " records, and with ", dtype, " of ",
      prefetcher->record_bytes(), " bytes each, got ", shape);
  return value_of(prefetcher->wait(number)).view(dtype).view(shape);
}

void prefetch_close(at::Tensor& handle) {
  check_shape("prefetch_close", "handle", handle, "[4]", {4});
  check_dtype("prefetch_close", "handle", handle, at::kLong);
  prefetchers().remove(handle.const_data_ptr<int64_t>()[0]);
  handle.select(0, 0).zero_();
}

}  // namespace

TORCH_LIBRARY_IMPL(kvswap_torch, CPU, library) {
  library.impl("prefetch_submit", prefetch_submit);
  library.impl("prefetch_wait", prefetch_wait);
  library.impl("prefetch_close", prefetch_close);
}

TORCH_LIBRARY_IMPL(kvswap_torch, CompositeExplicitAutograd, library) {
  library.impl("prefetch_open", prefetch_open);
}

}  // namespace kvswap
