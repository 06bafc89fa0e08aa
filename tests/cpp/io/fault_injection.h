#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "io/block_reader.h"
#include "io/forwarding_file.h"

namespace kvswap {

/// What goes wrong, counted over the life of the wrapper; numbers start at 1, 0 is never.
struct ReadFaults {
  uint64_t fail_submit = 0;     // this submit() is refused
  uint64_t fail_read = 0;       // the batch with this read fails, after the bytes arrived
  uint64_t flip_read = 0;       // one bit of this read is wrong, and nobody is told
  uint64_t misdirect_read = 0;  // this read fetches the bytes of another place, and nobody is told
  int64_t misdirect_bytes = 0;  // how far away; aligned
  bool interrupt_after_flip = false;  // the call that submits next is asked to end, once
  int error_number = EIO;

  uint64_t submits_seen = 0;
  uint64_t reads_seen = 0;
};

/// Wraps a reader and injects the faults that `faults` asks for; the caller keeps `faults` and may
/// change it between calls. The product code knows nothing of it.
class FaultyReader final : public BlockReader {
 public:
  FaultyReader(std::unique_ptr<BlockReader> inner, ReadFaults* faults)
      : inner_(std::move(inner)), faults_(faults) {}

  Result<Ticket> submit(std::span<const BlockRead> reads) override {
    if (++faults_->submits_seen == faults_->fail_submit) return injected("submit");
    if (has_flipped_ && std::exchange(faults_->interrupt_after_flip, false)) {
      return Status::interrupted("submit: injected interrupt", EINTR);
    }
    std::vector<BlockRead> changed(reads.begin(), reads.end());
    Planned planned;
    for (BlockRead& read : changed) {
      const uint64_t number = ++faults_->reads_seen;
      if (number == faults_->fail_read) planned.fails = true;
      if (number == faults_->flip_read) planned.flipped = read.targets.back();
      if (number == faults_->misdirect_read) read.offset_bytes += faults_->misdirect_bytes;
    }
    Result<Ticket> ticket = inner_->submit(changed);
    if (ticket.is_ok()) planned_[ticket.value()] = planned;
    return ticket;
  }

  Status wait(Ticket ticket) override {
    Status status = inner_->wait(ticket);
    if (status.is_pending()) return status;
    const Planned planned = std::exchange(planned_[ticket], {});
    planned_.erase(ticket);
    if (!status.is_ok()) return status;
    if (planned.fails) return injected("read");
    if (planned.flipped.iov_len > 0) {
      static_cast<std::byte*>(planned.flipped.iov_base)[planned.flipped.iov_len - 1] ^=
          std::byte{0x10};
      has_flipped_ = true;
    }
    return status;
  }

  bool is_done(Ticket ticket) override { return inner_->is_done(ticket); }
  ReaderCounters counters() const override { return inner_->counters(); }
  std::string name() const override { return "faulty(" + inner_->name() + ")"; }

 private:
  struct Planned {
    bool fails = false;
    iovec flipped{};
  };

  Status injected(const std::string& where) const {
    return Status::storage(where + ": injected fault", faults_->error_number);
  }

  std::unique_ptr<BlockReader> inner_;
  ReadFaults* faults_;
  bool has_flipped_ = false;
  std::map<Ticket, Planned> planned_;
};

/// Changed by a test while the queue's thread writes: what that reads meanwhile is atomic.
struct WriteFaults {
  std::atomic<uint64_t> fail_write = 0;    // this write() fails and writes nothing
  std::atomic<uint64_t> tear_write = 0;    // this write() puts its first half down and fails
  uint64_t flip_write = 0;                 // one bit of this write() goes down wrong, unnoticed
  std::atomic<uint64_t> fail_reserve = 0;  // this reserve() fails
  std::atomic<bool> lasts = false;         // fail_write is the first of many: until it is set to 0
  int error_number = ENOSPC;

  std::atomic<uint64_t> writes_seen = 0;
  std::atomic<uint64_t> reserves_seen = 0;
};

/// The same for the file. Called by one thread at a time, like the file itself.
class FaultyDataFile final : public ForwardingFile {
 public:
  FaultyDataFile(std::unique_ptr<DataFile> inner, WriteFaults* faults)
      : ForwardingFile(std::move(inner)), faults_(faults) {}

  Status reserve(int64_t size_bytes) override {
    if (++faults_->reserves_seen == faults_->fail_reserve) return injected("reserve");
    return ForwardingFile::reserve(size_bytes);
  }

  Status write(int64_t offset_bytes, std::span<const std::byte> bytes) override {
    const uint64_t number = ++faults_->writes_seen;
    const uint64_t first = faults_->fail_write;
    if (number == first || (faults_->lasts && first > 0 && number > first))
      return injected("write");
    if (number == faults_->tear_write) {
      const auto alignment = static_cast<size_t>(alignment_bytes());
      const size_t half = bytes.size() / 2 / alignment * alignment;
      if (half > 0) KVSWAP_RETURN_IF_ERROR(ForwardingFile::write(offset_bytes, bytes.first(half)));
      return injected("write");
    }
    if (number == faults_->flip_write) {
      // The caller's bytes are const but its memory is ours to borrow for the length of the call.
      auto* last = const_cast<std::byte*>(bytes.data()) + bytes.size() - 1;
      *last ^= std::byte{0x10};
      Status status = ForwardingFile::write(offset_bytes, bytes);
      *last ^= std::byte{0x10};
      return status;
    }
    return ForwardingFile::write(offset_bytes, bytes);
  }

 private:
  Status injected(const std::string& where) const {
    return Status::storage(where + ": injected fault", faults_->error_number);
  }

  WriteFaults* faults_;
};

}  // namespace kvswap
