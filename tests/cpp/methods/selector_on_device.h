#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "device/host_device.h"
#include "methods/selection/device_selector.h"
#include "methods/selection/selector_factory.h"

namespace kvswap {

/// Where a selector is; none: on the CPU.
using Place = std::optional<HostDeviceOptions>;

/// A selector of make_selector() with all it needs, on a device that is no device.
class OnDevice {
 public:
  OnDevice(const HostDeviceOptions& device, const MethodOptions& options,
           const DeviceSelector::Room& room) {
    const DeviceKind kind = host_device(device);
    device_ = std::move(kind.make().value());
    const SummaryKind& rows = *SummaryKind::find(options.rows);
    const RowLayout layout(rows, options);
    const int64_t sealing =
        rows.on_device == nullptr ? 0 : rows.on_device->table_bytes(layout, 1, room.groups);
    const int64_t segment = std::max(DeviceSelector::table_bytes(layout, room), sealing);
    tables_.resize(UploadRing::kSegments * segment);
    answer_.resize(DeviceSelector::answer_bytes(room));
    ring_ = std::move(UploadRing::create(*device_, tables_.data(), segment).value());
    selector_ = make_selector(options, device_.get());
    EXPECT_TRUE(selector_
                    ->reserve({.room = room,
                               .scratch = &kind.scratch,
                               .tables = ring_.get(),
                               .answer = answer_.data()})
                    .is_ok());
  }
  Selector& selector() { return *selector_; }

 private:
  std::vector<std::byte> tables_;
  std::vector<std::byte> answer_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<UploadRing> ring_;
  std::unique_ptr<Selector> selector_;
};

}  // namespace kvswap
