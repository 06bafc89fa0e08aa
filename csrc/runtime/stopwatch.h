#pragma once

#include <chrono>

namespace kvswap {

/// Adds the seconds of its life to a total.
class Stopwatch {
 public:
  explicit Stopwatch(double& total) : total_(total), begin_(std::chrono::steady_clock::now()) {}
  ~Stopwatch() {
    total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& total_;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace kvswap
