#include "io/wait_policy.h"

#include <cerrno>
#include <cstdio>
#include <utility>

namespace kvswap {
namespace {

constexpr double kLogSeconds = 1;
constexpr double kStoodStillSeconds = 1;  // between two looks

double seconds_between(int64_t begin_ns, int64_t end_ns) {
  return 1e-9 * static_cast<double>(end_ns - begin_ns);
}

std::mutex log_mutex;
std::function<void(const std::string&)> log_taker;

}  // namespace

int64_t WaitPolicy::now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Status WaitPolicy::check() const {
  if (waits_for_all_) return Status::ok();
  if (is_stopped_) return Status::interrupted("session: the call was ended by close()", ECANCELED);
  if (shall_end_ && shall_end_()) {
    return Status::interrupted("session: the call was ended by a signal", EINTR);
  }
  return Status::ok();
}

void WaitPolicy::Watch::look(int64_t progressed) {
  const int64_t before = std::exchange(looked_ns, now_ns());
  if (std::exchange(progressed_ns, progressed) != progressed) stood_ns = 0;
  // Each look counts as long as it was to take, so that a wait ends on the slowest machine.
  constexpr int64_t kLook = std::chrono::nanoseconds(kLookUp).count();
  const bool stood_still = seconds_between(before, looked_ns) > kStoodStillSeconds;
  if (stood_still) stood_ns += looked_ns - before - kLook;
}

double WaitPolicy::Watch::seconds() const {
  return seconds_between(progressed_ns + stood_ns, looked_ns);
}

Status WaitPolicy::look_up(const std::string& what, Watch& watch) const {
  KVSWAP_RETURN_IF_ERROR(check());
  const double seconds = watch.seconds();
  if (seconds > kLogSeconds && !std::exchange(watch.is_logged, true)) {
    log_line("kvswap: " + what + " has taken more than a second");
  }
  // What came while the process was stopped is not taken in at once: a call gives it time.
  const double waited = seconds_between(watch.began_ns, watch.looked_ns);
  const bool is_early = seconds < timeout_seconds_ || waited < std::min(timeout_seconds_, 1.0);
  if (timeout_seconds_ <= 0 || is_early || waits_for_all_) return Status::ok();
  return Status::late(what + " must make progress within io_timeout_seconds (" +
                      std::to_string(timeout_seconds_) +
                      "), and has not; the disk hangs: see the kernel log, try again, or close");
}

void log_line(const std::string& line) {
  const std::lock_guard lock(log_mutex);
  if (log_taker) {
    log_taker(line);
  } else {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
}

void set_log(std::function<void(const std::string&)> log) {
  const std::lock_guard lock(log_mutex);
  log_taker = std::move(log);
}

}  // namespace kvswap
