#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "device/device.h"
#include "device/upload_ring.h"
#include "methods/selection/summary_selector.h"
#include "methods/summary/device_encoder.h"

namespace kvswap {

/// Rows on a device (DeviceEncoder): summaries live there, and all sequences of a batch are scored
/// and chosen by one kernel beside what the caller's stream does; the ids come back in one small
/// copy. For that kernel a row of a group is a token, and its group has one.
///
/// Keys and queries are the device's. reserve() comes before what it must hold, with nothing under
/// way. One choice is under way at a time.
class DeviceSelector final : public SummarySelector {
 public:
  /// kind: that of options.rows, with rows on a device.
  DeviceSelector(Device& device, const SummaryKind& kind, const MethodOptions& options);

  using Room = SelectionRoom;
  /// Bytes of what asks.
  static int64_t asked_bytes(const Room& room);
  /// Bytes of the answer: pinned host memory, and as much on the device.
  static int64_t answer_bytes(const Room& room);
  /// Bytes on the device for a choice, the answer included.
  static int64_t device_bytes(const ScratchSizes& scratch, const RowLayout& layout,
                              const Room& room);
  /// Bytes of the tables of one choice.
  static int64_t table_bytes(const RowLayout& layout, const Room& room);

  Status reserve(const SelectionPlace& place) override;

  void choose(const ChooseArgs& args) override;
  Status start_choice(const ChooseArgs& args) override;
  Status finish_choice() override;
  bool is_choosing() const override { return target_ != nullptr; }
  double wait_seconds() const override { return wait_seconds_; }

 protected:
  void write(int64_t layer, std::span<const SummarySlice> pieces) override;

 private:
  DeviceSelector(Device& device, const SummaryKind& kind, const MethodOptions& options,
                 const std::shared_ptr<SummaryMemory>& memory);
  uint64_t rows_that_count(const PaddingMask& valid, int64_t first) const;
  void score(const ChooseArgs& args);

  Device& device_;
  const RowLayout layout_;
  std::unique_ptr<DeviceEncoder> on_device_;
  Room room_;
  UploadRing* tables_ = nullptr;
  std::byte* answer_ = nullptr;  // host: [batch, queries, k] ids, [batch, queries] counts
  DeviceBytes asked_with_;  // [batch, queries, width] fp32, by mass [batch, queries, heads, width]
  DeviceBytes scratch_;
  DeviceBytes device_answer_;
  Event asked_ = -1;
  Event answered_ = -1;
  std::vector<std::vector<int32_t>>* target_ = nullptr;  // of the choice under way
  int64_t queries_ = 0;
  int64_t k_ = 0;
  double wait_seconds_ = 0;
};

}  // namespace kvswap
