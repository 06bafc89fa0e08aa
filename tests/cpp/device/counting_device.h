#pragma once

#include <memory>
#include <string>
#include <utility>

#include "device/device.h"

namespace kvswap {

/// Counts what is asked of a device, which does it.
class CountingDevice final : public Device {
 public:
  explicit CountingDevice(std::unique_ptr<Device> device) : device_(std::move(device)) {}

  struct Counts {
    int64_t copies_in = 0, copies_out = 0, launches = 0, records = 0, waits = 0, synchronised = 0;
  };
  Counts counts;

  std::string name() const override { return device_->name(); }
  Result<std::byte*> allocate(int64_t bytes) override { return device_->allocate(bytes); }
  void free(std::byte* memory, int64_t bytes) override { device_->free(memory, bytes); }
  Status pin(std::byte* host, int64_t bytes) override {
    pinned_bytes_ += bytes;
    return device_->pin(host, bytes);
  }
  void unpin(std::byte* host, int64_t bytes) override {
    pinned_bytes_ -= bytes;
    device_->unpin(host, bytes);
  }
  Result<Event> make_event() override { return device_->make_event(); }
  void record(Event event) override {
    ++counts.records;
    const On on(*device_, stream());
    device_->record(event);
  }
  void wait(Event event) override {
    ++counts.waits;
    const On on(*device_, stream());
    device_->wait(event);
  }
  Status synchronize(Event event) override {
    ++counts.synchronised;
    return device_->synchronize(event);
  }
  double seconds_between(Event begin, Event end) override {
    return device_->seconds_between(begin, end);
  }
  Status drain() override { return device_->drain(); }
  Status hand_back() override { return device_->hand_back(); }
  void set_compute_stream(void* stream) override { device_->set_compute_stream(stream); }
  void copy_in(void* to, const void* host, int64_t bytes) override {
    ++counts.copies_in;
    const On on(*device_, stream());
    device_->copy_in(to, host, bytes);
  }
  void copy_out(void* host, const void* from, int64_t bytes) override {
    ++counts.copies_out;
    const On on(*device_, stream());
    device_->copy_out(host, from, bytes);
  }
  void copy(void* to, const void* from, int64_t bytes) override {
    const On on(*device_, stream());
    device_->copy(to, from, bytes);
  }
  void launch(const KernelLaunch& call) override {
    ++counts.launches;
    const On on(*device_, stream());
    device_->launch(call);
  }

 private:
  std::unique_ptr<Device> device_;
};

}  // namespace kvswap
