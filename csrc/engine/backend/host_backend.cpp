#include <cstring>

#include "engine/backend/memory_backend.h"

namespace kvswap {
namespace {

/// Reads land in their pages.
class HostLoadStaging final : public LoadStaging {
 public:
  explicit HostLoadStaging(AtEnd at_end) : at_end_(at_end) {}

  Result<std::shared_ptr<std::byte>> make_landing(int64_t bytes) override {
    return share_aligned_bytes(bytes, at_end_);
  }
  bool can_acquire(int64_t) const override { return true; }
  Status acquire(Fetch& fetch) override {
    for (Load& load : fetch.loads) load.target = load.home;
    return Status::ok();
  }
  Status publish(Fetch&) override { return Status::ok(); }
  void give_back(Fetch&) override {}
  std::byte* landing_in(std::byte* page) const override { return page; }

 private:
  const AtEnd at_end_;
};

/// Records are packed where they are written from.
class HostStoreStaging final : public StoreStaging {
 public:
  std::byte* at(const RecordStore::StagedRun& run) override { return run.data(); }
  int8_t* notes_at(RecordStore::StagedRun& run) override { return run.notes.data(); }
  Sent send(const RecordStore::StagedRun&, int64_t) override { return Sent::kArrived; }
  Status arrive(RecordStore::StagedRun&) override { return Status::ok(); }
};

class HostCompute final : public Compute {
 public:
  explicit HostCompute(const ParallelFor* parallel) : execution_{.parallel = parallel} {}

  void pack(const cuda::BatchTransferArgs& args) override {
    run_parallel(execution_, args.count, 16, [&](int64_t begin, int64_t end) {
      const auto sequence_of = [&](int64_t i) {
        return args.sequences == nullptr ? 0 : args.sequences[i];
      };
      for (int64_t first = begin, next; first < end; first = next) {
        next = first + 1;
        while (next < end && sequence_of(next) == sequence_of(first)) ++next;
        pack_sequence(args, sequence_of(first), first, next - first);
      }
    });
  }
  void encode(const RecordCodecArgs& args) override { encode_records(args, execution_); }
  void copy(std::byte* to, const std::byte* from, int64_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  Status upload(std::byte* to, const std::byte* host, int64_t bytes) override {
    std::memcpy(to, host, bytes);
    return Status::ok();
  }
  Status download(std::byte* host, const std::byte* from, int64_t bytes) override {
    std::memcpy(host, from, bytes);
    return Status::ok();
  }
  Status upload_pages(std::span<std::byte* const> pages, const std::byte* host,
                      int64_t bytes) override {
    for (std::byte* page : pages) {
      std::memcpy(page, host, bytes);
      host += bytes;
    }
    return Status::ok();
  }
  Result<const std::byte*> map_for_host(const std::byte* from, int64_t,
                                        std::vector<std::byte>&) override {
    return from;
  }

  void attend(int64_t, const PagedAttentionArgs& args) override {
    paged_attention(args, execution_);
  }
  float* log_sum_exps(float* host) override { return host; }
  Status weigh(const AttentionMassArgs& args) override {
    attention_mass(args, execution_);
    return Status::ok();
  }
  Status hand_back() override { return Status::ok(); }
  void set_compute_stream(void*) override {}

 private:
  static void pack_sequence(const cuda::BatchTransferArgs& args, int64_t sequence, int64_t first,
                            int64_t count) {
    const int64_t bytes = args.shape.element_bytes;
    TokenView tokens = args.tokens;
    tokens.keys = static_cast<std::byte*>(tokens.keys) + args.key_offset(sequence) * bytes;
    tokens.values = static_cast<std::byte*>(tokens.values) + args.value_offset(sequence) * bytes;
    pack_records({.shape = args.shape,
                  .tokens = tokens,
                  .records = args.records + first,
                  .first_tokens = args.first_tokens + first,
                  .slots = args.slots == nullptr ? nullptr : args.slots + first,
                  .lengths = args.lengths == nullptr ? nullptr : args.lengths + first,
                  .count = count});
  }

  Execution execution_;
};

class HostBackend final : public MemoryBackend {
 public:
  HostBackend(const ParallelFor* parallel, AtEnd at_end)
      : at_end_(at_end), landing_(at_end), compute_(parallel) {}

  std::string name() const override { return "cpu"; }
  LoadStaging& landing() override { return landing_; }
  StoreStaging& outbox() override { return outbox_; }
  Compute& compute() override { return compute_; }
  Result<PagePool> make_pool(int64_t pages, int64_t page_bytes) override {
    return make_host_page_pool(pages, page_bytes, at_end_);
  }
  Status reserve(int64_t, int64_t) override { return Status::ok(); }

 private:
  const AtEnd at_end_;
  HostLoadStaging landing_;
  HostStoreStaging outbox_;
  HostCompute compute_;
};

}  // namespace

std::unique_ptr<MemoryBackend> make_host_space(const ParallelFor* parallel, AtEnd at_end) {
  return std::make_unique<HostBackend>(parallel, at_end);
}

}  // namespace kvswap
