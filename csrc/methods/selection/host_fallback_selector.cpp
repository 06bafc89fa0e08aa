#include "methods/selection/host_fallback_selector.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>

namespace kvswap {
namespace {

constexpr int64_t kTokensAtOnce = 256;
constexpr int64_t kPage = 4096;  // no page is pinned twice

/// Whole groups, so that a row is never made of two copies.
int64_t tokens_at_once(int64_t group_tokens) {
  return std::max<int64_t>(1, kTokensAtOnce / group_tokens) * group_tokens;
}

}  // namespace

int64_t HostFallbackSelector::key_bytes(const MethodOptions& options) {
  return options.kv_heads * tokens_at_once(options.group_tokens) * options.head_dim *
         int64_t{sizeof(float)};
}

int64_t HostFallbackSelector::query_bytes(const MethodOptions& options, int64_t queries) {
  return options.heads * queries * options.head_dim * int64_t{sizeof(float)};
}

Status HostFallbackSelector::reserve(const SelectionPlace&) {
  if (copied_ >= 0) return Status::ok();
  Event* const events[] = {&copied_};
  return make_events(device_, events);
}

Status HostFallbackSelector::wait() {
  device_.record(copied_);
  const auto began = std::chrono::steady_clock::now();
  const Status copied = device_.synchronize(copied_);
  wait_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return copied;
}

Status HostFallbackSelector::append(std::span<const SealedKeys> sealed) {
  if (sealed.empty() || rows().shape(sealed.front().layer).width == 0) return Status::ok();
  for (const SealedKeys& each : sealed) KVSWAP_RETURN_IF_ERROR(append_copy(each));
  return Status::ok();
}

/// Of what the host is sent, some tokens at a time.
Status HostFallbackSelector::append_copy(const SealedKeys& sealed) {
  const KeyView& keys = sealed.keys;
  for (int64_t first = 0; first < sealed.tokens;) {
    const int64_t count = std::min(tokens_at_once(options().group_tokens), sealed.tokens - first);
    Dimension heads = {options().kv_heads, keys.head_stride};
    Dimension tokens = {count, keys.token_stride};
    const int64_t bytes = dtype_bytes(keys.dtype);
    KVSWAP_RETURN_IF_ERROR(make_room(heads.count * count * options().head_dim * bytes));
    std::array dimensions = {heads, tokens};
    copy_out(static_cast<const std::byte*>(keys.data) + first * keys.token_stride * bytes,
             keys.dtype, dimensions);
    KVSWAP_RETURN_IF_ERROR(wait());
    SealedKeys part = sealed;
    part.keys = {copy_.get(), dimensions[0].stride, dimensions[1].stride, keys.dtype};
    part.tokens = count;
    KVSWAP_RETURN_IF_ERROR(SummarySelector::append(std::span(&part, 1)));
    first += count;
  }
  return Status::ok();
}

Status HostFallbackSelector::start_choice(const ChooseArgs& args) {
  const QueryView& query = args.query;
  const auto sequences = static_cast<int64_t>(args.candidates.size());
  std::array dimensions = {Dimension{sequences / query.heads_apart, query.batch_stride},
                           Dimension{query.heads_apart * query.heads, query.head_stride},
                           Dimension{query.queries, query.query_stride}};
  KVSWAP_RETURN_IF_ERROR(make_room(sequences * query.heads * query.queries * options().head_dim *
                                   dtype_bytes(query.dtype)));
  {
    // The caller's stream: the query is its tensor.
    const Device::On compute(device_, Stream::kCompute);
    copy_out(static_cast<const std::byte*>(query.data), query.dtype, dimensions);
    KVSWAP_RETURN_IF_ERROR(wait());
  }
  ChooseArgs on_host = args;
  on_host.query.data = copy_.get();
  on_host.query.batch_stride = dimensions[0].stride;
  on_host.query.head_stride = dimensions[1].stride;
  on_host.query.query_stride = dimensions[2].stride;
  return SummarySelector::start_choice(on_host);
}

/// Copies the numbers of a head for each index of `dimensions`, whose strides become the copy's.
void HostFallbackSelector::copy_out(const std::byte* from, DType dtype,
                                    std::span<Dimension> dimensions) {
  int64_t run = options().head_dim;  // of numbers without a gap: one copy
  std::vector<Dimension> outside;    // of it, as they stand on the device
  std::vector<Dimension*> left;
  for (Dimension& each : dimensions) left.push_back(&each);
  int64_t taken = run;
  const auto take = [&](std::vector<Dimension*>::iterator next) {
    (*next)->stride = std::exchange(taken, taken * (*next)->count);
    left.erase(next);
  };
  const auto goes_on = [&](const Dimension* each) {
    return each->stride == run || each->count == 1;
  };
  auto next = std::find_if(left.begin(), left.end(), goes_on);
  while (next != left.end()) {
    run *= (*next)->count;
    take(next);
    next = std::find_if(left.begin(), left.end(), goes_on);
  }
  while (!left.empty()) {
    outside.push_back(*left.front());
    take(left.begin());
  }
  int64_t copies = 1;
  for (const Dimension& each : outside) copies *= each.count;
  const int64_t bytes = dtype_bytes(dtype);
  for (int64_t i = 0; i < copies; ++i) {
    int64_t offset = 0;
    int64_t index = i;
    for (const Dimension& each : outside) {
      offset += std::exchange(index, index / each.count) % each.count * each.stride;
    }
    device_.copy_out(copy_.get() + i * run * bytes, from + offset * bytes, run * bytes);
  }
}

/// What stood there is gone; nothing that is queued uses it.
Status HostFallbackSelector::make_room(int64_t bytes) {
  if (bytes <= copy_bytes_) return Status::ok();
  if (copy_bytes_ > 0) device_.unpin(copy_.get(), copy_bytes_);
  copy_bytes_ = 0;
  const int64_t room = (bytes + kPage - 1) / kPage * kPage;
  copy_.reset(static_cast<std::byte*>(std::aligned_alloc(kPage, room)));
  if (copy_ == nullptr) {
    return Status::budget("choice: the host must lend " + std::to_string(bytes) +
                          " bytes for keys and queries of the device, and refused");
  }
  KVSWAP_RETURN_IF_ERROR(device_.pin(copy_.get(), bytes));
  copy_bytes_ = bytes;
  return Status::ok();
}

HostFallbackSelector::~HostFallbackSelector() {
  if (copy_bytes_ > 0) device_.unpin(copy_.get(), copy_bytes_);
}

void HostFallbackSelector::Free::operator()(std::byte* memory) const { std::free(memory); }

}  // namespace kvswap
