#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <vector>

#include "device/device.h"
#include "device/upload_ring.h"
#include "engine/backend/memory_backend.h"

namespace kvswap {

/// Packing and attention on a device; the host waits for what it is to see of it alone.
///
/// Order between streams, each by an event:
///   compute -> write   tokens exist before they are packed
///   write -> compute   tokens may be freed when they are packed
///   compute -> load    attended(layer), which DeviceLoadStaging waits for
class DeviceCompute final : public Compute {
 public:
  /// `tables` is filled by the space's reserve().
  DeviceCompute(Device& device, const std::unique_ptr<UploadRing>& tables, int64_t page_layers)
      : device_(device), tables_(tables), attended_(page_layers) {}
  Status open();
  /// Scratch of attention, and of its log-sum-exps and mass; nothing is in flight.
  Status reserve(int64_t scratch_bytes, int64_t mass_bytes);
  /// Reached after the last attention over a layer's pages, which others may share.
  Event attended(int64_t layer) const { return attended_[layer % std::ssize(attended_)]; }

  void pack(const cuda::BatchTransferArgs& args) override;
  void encode(const RecordCodecArgs& args) override;
  void copy(std::byte* to, const std::byte* from, int64_t bytes) override;
  Status upload(std::byte* to, const std::byte* host, int64_t bytes) override;
  Status download(std::byte* host, const std::byte* from, int64_t bytes) override;
  Status upload_pages(std::span<std::byte* const> pages, const std::byte* host,
                      int64_t bytes) override;
  Result<const std::byte*> map_for_host(const std::byte* from, int64_t bytes,
                                        std::vector<std::byte>& room) override;
  void mark_tokens() override;
  void begin_chunk() override;
  void end_chunk() override;
  void attend(int64_t layer, const PagedAttentionArgs& args) override;
  float* log_sum_exps(float*) override { return reinterpret_cast<float*>(mass_.data()); }
  Status weigh(const AttentionMassArgs& args) override;
  Status hand_back() override { return device_.hand_back(); }
  void set_compute_stream(void* stream) override { device_.set_compute_stream(stream); }

 private:
  PagedAttentionArgs with_tables(const PagedAttentionArgs& args);
  Status wait_for_host();

  Device& device_;
  const std::unique_ptr<UploadRing>& tables_;
  DeviceBytes scratch_;
  DeviceBytes mass_;                 // log-sum-exps, means, squares
  std::optional<Device::On> chunk_;  // makes kWrite the current stream inside a chunk
  std::vector<Event> attended_;      // [page_layers]
  Event tokens_ = -1;                // a chunk's tokens exist
  Event packed_ = -1;                // a chunk's tokens are packed
  Event copied_ = -1;                // what the host waits for has come
};

}  // namespace kvswap
