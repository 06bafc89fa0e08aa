#include "methods/hosted_selector.h"

#include <algorithm>
#include <chrono>

namespace kvswap {
namespace {

constexpr int64_t kTokensAtOnce = 256;

/// Whole groups, so that a row is never made of two copies.
int64_t tokens_at_once(int64_t group_tokens) {
  return std::max<int64_t>(1, kTokensAtOnce / group_tokens) * group_tokens;
}

}  // namespace

int64_t HostedSelector::key_bytes(const MethodOptions& options) {
  return options.kv_heads * tokens_at_once(options.group_tokens) * options.head_dim *
         int64_t{sizeof(float)};
}

int64_t HostedSelector::query_bytes(const MethodOptions& options, int64_t queries) {
  return options.heads * queries * options.head_dim * int64_t{sizeof(float)};
}

Status HostedSelector::reserve(const SelectionPlace&) {
  if (copied_ >= 0) return Status::ok();
  Event* const events[] = {&copied_};
  return make_events(device_, events);
}

Status HostedSelector::wait() {
  device_.record(copied_);
  const auto began = std::chrono::steady_clock::now();
  const Status copied = device_.synchronize(copied_);
  wait_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return copied;
}

Status HostedSelector::append(std::span<const SealedKeys> sealed) {
  if (sealed.empty() || rows().shape(sealed.front().layer).width == 0) return Status::ok();
  for (const SealedKeys& each : sealed) KVSWAP_RETURN_IF_ERROR(append_copy(each));
  return Status::ok();
}

/// Of what the host is sent, some tokens at a time.
Status HostedSelector::append_copy(const SealedKeys& sealed) {
  const int64_t bytes = options().head_dim * dtype_bytes(sealed.keys.dtype);
  for (int64_t first = 0; first < sealed.tokens;) {
    const int64_t count = std::min(tokens_at_once(options().group_tokens), sealed.tokens - first);
    copy_.resize(options().kv_heads * count * bytes);
    const auto* keys = static_cast<const std::byte*>(sealed.keys.data);
    const bool is_whole = sealed.keys.token_stride == options().head_dim;
    const int64_t tokens_a_copy = is_whole ? count : 1;
    for (int64_t head = 0; head < options().kv_heads; ++head) {
      for (int64_t token = 0; token < count; token += tokens_a_copy) {
        const int64_t from =
            head * sealed.keys.head_stride + (first + token) * sealed.keys.token_stride;
        device_.copy_out(copy_.data() + (head * count + token) * bytes,
                         keys + from * dtype_bytes(sealed.keys.dtype), tokens_a_copy * bytes);
      }
    }
    KVSWAP_RETURN_IF_ERROR(wait());
    SealedKeys part = sealed;
    part.keys = {copy_.data(), count * options().head_dim, options().head_dim, sealed.keys.dtype};
    part.tokens = count;
    KVSWAP_RETURN_IF_ERROR(RowSelector::append(std::span(&part, 1)));
    first += count;
  }
  return Status::ok();
}

Status HostedSelector::start_choice(const ChooseArgs& args) {
  const QueryView& query = args.query;
  const auto batch = static_cast<int64_t>(args.candidates.size());
  const int64_t bytes = options().head_dim * dtype_bytes(query.dtype);
  copy_.resize(batch * query.heads * query.queries * bytes);
  ChooseArgs on_host = args;
  on_host.query.data = copy_.data();
  on_host.query.query_stride = options().head_dim;
  on_host.query.head_stride = query.queries * options().head_dim;
  on_host.query.heads_apart = 1;
  on_host.query.batch_stride = query.heads * on_host.query.head_stride;
  {
    // The caller's stream: the query is its tensor.
    const Device::On compute(device_, Stream::kCompute);
    for (int64_t row = 0; row < batch * query.heads * query.queries; ++row) {
      const int64_t head = row / query.queries;
      device_.copy_out(copy_.data() + row * bytes,
                       query.at(head / query.heads, head % query.heads, row % query.queries),
                       bytes);
    }
    KVSWAP_RETURN_IF_ERROR(wait());
  }
  return RowSelector::start_choice(on_host);
}

}  // namespace kvswap
