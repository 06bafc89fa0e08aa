#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "device/device.h"
#include "methods/row_selector.h"

namespace kvswap {

/// Rows on the host of keys on a device: for rows that have no device kernels yet. Sealed keys and
/// queries are copied to the host, and the caller waits for both copies: slower, on any device.
class HostedSelector final : public RowSelector {
 public:
  HostedSelector(Device& device, const MethodOptions& options, std::unique_ptr<Rows> rows,
                 std::shared_ptr<SummaryMemory> memory)
      : RowSelector(options, std::move(rows), std::move(memory)), device_(device) {}

  Status reserve(const SelectionPlace& place) override;
  using RowSelector::append;
  Status append(std::span<const SealedKeys> sealed) override;
  Status start_choice(const ChooseArgs& args) override;
  double wait_seconds() const override { return wait_seconds_; }

  // Bytes of the host that copies take: of keys, and of one sequence's queries.
  static int64_t key_bytes(const MethodOptions& options);
  static int64_t query_bytes(const MethodOptions& options, int64_t queries);

 private:
  Status append_copy(const SealedKeys& sealed);
  Status wait();

  Device& device_;
  std::vector<std::byte> copy_;
  Event copied_ = -1;
  double wait_seconds_ = 0;
};

}  // namespace kvswap
