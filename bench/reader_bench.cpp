// Drives the readers by commands on standard input, one JSON line of answer each, so that a script
// can pair them with another program on the same file:
//
//   create DIRECTORY BYTES                       the file that is read, under /proc while we live
//   stream KIND BLOCK DEPTH SECONDS              random reads, always at least DEPTH to do
//   batch KIND BLOCK DEPTH READS PAUSE_US COUNT  COUNT batches of READS, a busy pause between
//   submit
//                                                and wait, an idle one of 2 ms between batches

#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iostream>
#include <random>
#include <sstream>
#include <vector>

#include "io/readers.h"

namespace kvswap {
namespace {

double now_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

template <typename T>
T must(Result<T> result) {
  if (result.is_ok()) return std::move(result.value());
  std::fprintf(stderr, "reader_bench: %s\n", result.status().message().c_str());
  std::exit(1);
}

void must(const Status& status) {
  if (status.is_ok()) return;
  std::fprintf(stderr, "reader_bench: %s\n", status.message().c_str());
  std::exit(1);
}

ReaderKind parse_kind(const std::string& name) {
  if (name == "uring") return ReaderKind::kUring;
  if (name == "threads") return ReaderKind::kThreads;
  return ReaderKind::kSync;
}

/// `count` reads of random blocks, each with its own target.
class RandomBatch {
 public:
  RandomBatch(int64_t file_bytes, int64_t block, int count)
      : blocks_(file_bytes / block), block_(block), iovecs_(count), reads_(count) {
    const size_t bytes = static_cast<size_t>(block) * count;
    base_ = static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
    for (int index = 0; index < count; ++index) {
      iovecs_[index] = {base_ + block * index, static_cast<size_t>(block)};
      reads_[index].targets = {&iovecs_[index], 1};
    }
  }

  std::span<const BlockRead> shuffle(std::mt19937_64& random) {
    for (BlockRead& read : reads_) {
      read.offset_bytes = static_cast<int64_t>(random() % static_cast<uint64_t>(blocks_)) * block_;
    }
    return reads_;
  }

 private:
  int64_t blocks_;
  int64_t block_;
  std::byte* base_;
  std::vector<iovec> iovecs_;
  std::vector<BlockRead> reads_;
};

class Bench {
 public:
  void create(const std::string& directory, int64_t bytes) {
    file_ = must(DataFile::open({.directory = directory}));
    bytes_ = bytes;
    std::mt19937_64 random(1);
    constexpr size_t kChunk = 8 << 20;
    auto* chunk = static_cast<uint64_t*>(std::aligned_alloc(4096, kChunk));
    for (int64_t at = 0; at < bytes; at += kChunk) {
      for (size_t word = 0; word < kChunk / 8; ++word) chunk[word] = random();
      must(file_->write(at, {reinterpret_cast<std::byte*>(chunk), kChunk}));
    }
    std::free(chunk);
    ::fsync(file_->fd());
    std::printf("{\"path\": \"/proc/%d/fd/%d\", \"direct\": %s, \"alignment\": %lld}\n", ::getpid(),
                file_->fd(), file_->is_direct() ? "true" : "false",
                static_cast<long long>(file_->alignment_bytes()));
  }

  void stream(const std::string& kind, int64_t block, int depth, double seconds) {
    auto reader = open(kind, depth);
    constexpr int kBatches = 4;
    std::vector<RandomBatch> batches;
    for (int index = 0; index < kBatches; ++index) batches.emplace_back(bytes_, block, depth);
    const double start = now_seconds();
    const double cpu = cpu_seconds();
    std::deque<std::pair<Ticket, int>> flying;
    for (int index = 0; index < kBatches; ++index) {
      flying.push_back({must(reader->submit(batches[index].shuffle(random_))), index});
    }
    while (now_seconds() - start < seconds) {
      const auto [ticket, index] = flying.front();
      flying.pop_front();
      must(reader->wait(ticket));
      flying.push_back({must(reader->submit(batches[index].shuffle(random_))), index});
    }
    for (const auto& [ticket, index] : flying) must(reader->wait(ticket));
    const double taken = now_seconds() - start;
    const double bytes = static_cast<double>(reader->counters().bytes);
    std::printf("{\"mb_per_second\": %.2f, \"cpu_seconds_per_gb\": %.4f}\n", bytes / taken / 1e6,
                (cpu_seconds() - cpu) / (bytes / 1e9));
  }

  void batch(const std::string& kind, int64_t block, int depth, int reads, double pause,
             int count) {
    auto reader = open(kind, depth);
    RandomBatch batch(bytes_, block, reads);
    std::vector<double> submits, waits, totals;
    const double cpu = cpu_seconds();
    double idle_cpu = 0;
    for (int round = 0; round < count; ++round) {
      const auto blocks = batch.shuffle(random_);
      const double start = now_seconds();
      const Ticket ticket = must(reader->submit(blocks));
      const double submitted = now_seconds();
      while (now_seconds() < submitted + pause) {
      }
      const double waiting = now_seconds();
      must(reader->wait(ticket));
      const double end = now_seconds();
      submits.push_back(submitted - start);
      waits.push_back(end - waiting);
      totals.push_back(end - start);
      idle_cpu += pause;
      ::usleep(2000);
    }
    std::printf(
        "{\"submit_us\": %.1f, \"wait_us\": %.1f, \"total_us\": %.1f, "
        "\"total_p90_us\": %.1f, \"cpu_us\": %.1f}\n",
        1e6 * quantile(submits, 0.5), 1e6 * quantile(waits, 0.5), 1e6 * quantile(totals, 0.5),
        1e6 * quantile(totals, 0.9), 1e6 * (cpu_seconds() - cpu - idle_cpu) / count);
  }

 private:
  std::unique_ptr<BlockReader> open(const std::string& kind, int depth) {
    if (!file_) {
      std::fprintf(stderr, "reader_bench: create must come first\n");
      std::exit(1);
    }
    return must(open_reader(*file_, {.kind = parse_kind(kind), .depth = depth})).reader;
  }

  static double quantile(std::vector<double>& values, double share) {
    std::sort(values.begin(), values.end());
    return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
  }

  std::unique_ptr<DataFile> file_;
  int64_t bytes_ = 0;
  std::mt19937_64 random_{7};
};

int run() {
  Bench bench;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string command, text;
    int64_t block = 0;
    int depth = 0;
    words >> command >> text >> block;
    if (command == "create") {
      bench.create(text, block);
    } else if (command == "stream") {
      double seconds = 0;
      words >> depth >> seconds;
      bench.stream(text, block, depth, seconds);
    } else if (command == "batch") {
      int reads = 0;
      double pause_us = 0;
      int count = 0;
      words >> depth >> reads >> pause_us >> count;
      bench.batch(text, block, depth, reads, 1e-6 * pause_us, count);
    } else {
      std::fprintf(stderr, "reader_bench: unknown command '%s'\n", command.c_str());
      return 1;
    }
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace kvswap

int main() { return kvswap::run(); }
