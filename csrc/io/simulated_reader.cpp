#include <time.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <utility>
#include <vector>

#include "io/readers.h"

namespace kvswap {
namespace {

constexpr double kSpinSeconds = 150e-6;  // sleeping is late by about as much

double now_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void sleep_until(double seconds) {
  const double early = seconds - kSpinSeconds;
  if (early > now_seconds()) {
    timespec wake{};
    wake.tv_sec = static_cast<time_t>(early);
    wake.tv_nsec = static_cast<long>(1e9 * (early - static_cast<double>(wake.tv_sec)));
    while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &wake, nullptr) == EINTR) {
    }
  }
  while (now_seconds() < seconds) {
  }
}

/// When a device would be done with each read: it takes up to `depth` reads at once, each of which
/// needs the latency and then its turn on the bus that all share.
class DeviceClock {
 public:
  explicit DeviceClock(const DeviceModel& model)
      : model_(model), free_at_(static_cast<size_t>(std::max(model.depth, 1)), 0.0) {}

  double finish_read(double submitted_at, int64_t bytes) {
    std::pop_heap(free_at_.begin(), free_at_.end(), std::greater<>());
    double& place = free_at_.back();
    const double ready = std::max(submitted_at, place) + model_.latency_seconds;
    bus_free_at_ =
        std::max(ready, bus_free_at_) + static_cast<double>(bytes) / model_.bytes_per_second;
    place = bus_free_at_;
    std::push_heap(free_at_.begin(), free_at_.end(), std::greater<>());
    return bus_free_at_;
  }

 private:
  const DeviceModel model_;
  std::vector<double> free_at_;  // heap: when each place of the queue becomes free
  double bus_free_at_ = 0;
};

class SimulatedReader final : public BlockReader {
 public:
  SimulatedReader(std::unique_ptr<BlockReader> inner, const DeviceModel& model, Timeline* timeline)
      : inner_(std::move(inner)), name_(model.name), clock_(model), timeline_(timeline) {}

  Result<Ticket> submit(std::span<const BlockRead> reads) override {
    const double now = now_seconds();
    Result<Ticket> ticket = inner_->submit(reads);
    if (!ticket.is_ok()) return ticket;
    double done_at = now;
    for (const BlockRead& read : reads) {
      int64_t bytes = 0;
      for (const iovec& target : read.targets) bytes += static_cast<int64_t>(target.iov_len);
      const double read_at = clock_.finish_read(now, bytes);
      record(ticket.value(), now, read_at, bytes);
      done_at = std::max(done_at, read_at);
    }
    pending_.push_back({ticket.value(), done_at});
    return ticket;
  }

  Status wait(Ticket ticket) override {
    Status status = inner_->wait(ticket);
    const auto place = find(ticket);
    if (place == pending_.end()) return status;
    const double done_at = place->done_at;
    pending_.erase(place);
    if (status.is_ok()) sleep_until(done_at);
    return status;
  }

  bool is_done(Ticket ticket) override {
    const auto place = find(ticket);
    if (place != pending_.end() && now_seconds() < place->done_at) return false;
    return inner_->is_done(ticket);
  }

  ReaderCounters counters() const override { return inner_->counters(); }
  std::string name() const override { return name_ + "(" + inner_->name() + ")"; }

 private:
  struct Pending {
    Ticket ticket = 0;
    double done_at = 0;
  };

  /// The end is known before it comes.
  void record(Ticket ticket, double begin, double end, int64_t bytes) {
    if (timeline_ == nullptr) return;
    timeline_->record({.kind = SpanKind::kRead,
                       .ticket = ticket,
                       .begin_ns = static_cast<int64_t>(1e9 * begin),
                       .end_ns = static_cast<int64_t>(1e9 * end),
                       .bytes = bytes});
  }

  std::vector<Pending>::iterator find(Ticket ticket) {
    return std::find_if(pending_.begin(), pending_.end(),
                        [&](const Pending& pending) { return pending.ticket == ticket; });
  }

  std::unique_ptr<BlockReader> inner_;
  const std::string name_;
  DeviceClock clock_;
  Timeline* const timeline_;
  std::vector<Pending> pending_;
};

}  // namespace

std::optional<DeviceModel> find_device_model(const std::string& name) {
  // Bandwidth of nvme and emmc: KVSwap, section 5 (Jetson Orin AGX, measured: 1.8 GB/s, 250 MB/s).
  // Its figure 2 has both below 6 % of that at 512 B, so nvme gets 200,000 and emmc 10,000 reads
  // a second (what eMMC 5.1 data sheets promise) through their depth and latency.
  // ufs: DynaKV, section 2 (UFS 4.0, 2.9 GB/s a lane, 32 commands, bound by commands up to 24 KB,
  // hence 118,000 reads a second); ufs3 is half the lane speed of it (JESD220E, 11.6 Gbit/s).
  static const DeviceModel kModels[] = {
      {"nvme", 80e-6, 1.8e9, 16},
      {"ufs", 270e-6, 2.9e9, 32},
      {"ufs3", 270e-6, 1.45e9, 32},
      {"emmc", 200e-6, 250e6, 2},
  };
  for (const DeviceModel& model : kModels) {
    if (model.name == name) return model;
  }
  return std::nullopt;
}

std::unique_ptr<BlockReader> make_modelled_reader(std::unique_ptr<BlockReader> inner,
                                                  const DeviceModel& model, Timeline* timeline) {
  return std::make_unique<SimulatedReader>(std::move(inner), model, timeline);
}

}  // namespace kvswap
