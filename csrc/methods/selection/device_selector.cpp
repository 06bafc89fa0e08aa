#include "methods/selection/device_selector.h"

#include <algorithm>
#include <chrono>

namespace kvswap {
namespace {

class DeviceSummaryMemory final : public SummaryMemory {
 public:
  explicit DeviceSummaryMemory(Device& device) : device_(device) {}

  void copy(std::byte* to, const std::byte* from, int64_t bytes) override {
    device_.copy(to, from, bytes);
  }
  void upload(std::byte* to, const void* host, int64_t bytes) override {
    device_.copy_in(to, host, bytes);
    // An error is the device's, which keeps it and returns it from the next synchronize().
    (void)device_.drain().is_ok();
  }
  Status download(void* host, const std::byte* from, int64_t bytes) override {
    device_.copy_out(static_cast<std::byte*>(host), from, bytes);
    return device_.drain();
  }
  /// Not beyond its device, which goes with its session.
  bool is_shareable() const override { return false; }

 protected:
  std::byte* take(int64_t bytes) override {
    auto memory = device_.allocate(bytes);
    return memory.is_ok() ? memory.value() : nullptr;
  }
  void let_go(std::byte* memory, int64_t bytes) override { device_.free(memory, bytes); }

 private:
  Device& device_;
};

constexpr int64_t kWordRows = 64;

int64_t words_of(int64_t rows) { return (rows + kWordRows - 1) / kWordRows; }

int64_t bytes_of(int64_t count, int64_t size) { return UploadRing::padded(count * size); }

}  // namespace

DeviceSelector::DeviceSelector(Device& device, const SummaryKind& kind,
                               const MethodOptions& options)
    : DeviceSelector(device, kind, options, std::make_shared<DeviceSummaryMemory>(device)) {}

DeviceSelector::DeviceSelector(Device& device, const SummaryKind& kind,
                               const MethodOptions& options,
                               const std::shared_ptr<SummaryMemory>& memory)
    : SummarySelector(options, kind.make(options, memory), memory),
      device_(device),
      layout_(kind, options),
      on_device_(kind.on_device->make(device, options, rows())) {}

int64_t DeviceSelector::asked_bytes(const Room& room) {
  const int64_t rows = room.batch * room.queries * std::max<int64_t>(1, room.heads);
  return rows * room.rank * int64_t{sizeof(float)};
}

int64_t DeviceSelector::answer_bytes(const Room& room) {
  return room.batch * room.queries * (room.k + 1) * int64_t{sizeof(int32_t)};
}

int64_t DeviceSelector::device_bytes(const ScratchSizes& scratch, const RowLayout& layout,
                                     const Room& room) {
  cuda::BatchSelectArgs args;
  args.batch = room.batch;
  args.queries = room.queries;
  args.groups = room.groups;
  args.group_tokens = layout.rows_a_group;
  args.k = room.k;
  args.heads = room.heads;
  args.summary.rank = room.rank;
  return asked_bytes(room) + scratch.select_groups(args) + answer_bytes(room);
}

int64_t DeviceSelector::table_bytes(const RowLayout& layout, const Room& room) {
  const int64_t pointers = room.batch * layout.chunks(room.groups);
  return 2 * bytes_of(pointers, sizeof(void*)) + bytes_of(room.batch, sizeof(int64_t)) +
         bytes_of(room.batch * words_of(layout.rows(room.groups)), sizeof(uint64_t)) +
         bytes_of(room.batch * room.sinks, sizeof(int32_t)) +
         (room.differs ? bytes_of(room.batch * room.queries, sizeof(int32_t)) : 0);
}

Status DeviceSelector::reserve(const SelectionPlace& place) {
  KVSWAP_ASSERT(target_ == nullptr);
  if (asked_ < 0) {
    Event* const events[] = {&asked_, &answered_};
    KVSWAP_RETURN_IF_ERROR(make_events(device_, events));
  }
  const Room& room = place.room;
  const int64_t asked = asked_bytes(room);
  const int64_t rest = device_bytes(*place.scratch, layout_, room) - asked - answer_bytes(room);
  for (DeviceBytes* memory : {&asked_with_, &scratch_, &device_answer_}) {
    *memory = DeviceBytes();  // before the larger ones come
  }
  for (const auto& [memory, bytes] :
       {std::pair{&asked_with_, asked}, {&scratch_, rest}, {&device_answer_, answer_bytes(room)}}) {
    auto allocated = DeviceBytes::allocate(device_, bytes);
    if (!allocated.is_ok()) return allocated.status();
    *memory = std::move(allocated.value());
  }
  room_ = room;
  tables_ = place.tables;
  answer_ = place.answer;
  return Status::ok();
}

void DeviceSelector::write(int64_t layer, std::span<const SummarySlice> pieces) {
  on_device_->write(layer, pieces, *tables_);
}

void DeviceSelector::choose(const ChooseArgs& args) {
  // An error is the device's, which keeps it and returns it from the next synchronize().
  (void)start_choice(args).is_ok();
  (void)finish_choice().is_ok();
}

Status DeviceSelector::start_choice(const ChooseArgs& args) {
  KVSWAP_ASSERT(is_ready(args.layer) && args.chosen != nullptr && target_ == nullptr);
  const auto batch = static_cast<int64_t>(args.candidates.size());
  KVSWAP_ASSERT(batch == sequences() && batch <= room_.batch && args.groups <= room_.groups &&
                args.query.queries <= room_.queries && args.groups_per_query <= room_.k);
  target_ = args.chosen;
  queries_ = args.query.queries;
  k_ = args.groups_per_query;
  {
    // The caller's stream: the query is its tensor.
    const Device::On compute(device_, Stream::kCompute);
    on_device_->ask(args, batch, reinterpret_cast<float*>(asked_with_.data()));
    device_.record(asked_);
  }
  const Device::On scoring(device_, Stream::kScore);
  device_.wait(asked_);
  score(args);
  device_.copy_out(answer_, device_answer_.data(),
                   batch * queries_ * (k_ + 1) * int64_t{sizeof(int32_t)});
  device_.record(answered_);
  return Status::ok();
}

/// A bit for each of the rows from `first` on: does one of its tokens count?
uint64_t DeviceSelector::rows_that_count(const PaddingMask& valid, int64_t first) const {
  const int64_t each = layout_.tokens_a_row;
  if (each == 1) return valid.mask(first, kWordRows);
  uint64_t bits = 0;
  for (int64_t row = 0; row < kWordRows; ++row) {
    bits |= uint64_t{valid.mask((first + row) * each, each) != 0} << row;
  }
  return bits;
}

void DeviceSelector::score(const ChooseArgs& args) {
  const int64_t batch = sequences();
  const int64_t chunks = layout_.chunks(args.groups);
  const bool is_int8 = options().summary_dtype == DType::kInt8;
  std::vector<const void*> chunk_rows;
  std::vector<const float*> scales;
  std::vector<int64_t> first_rows;
  std::vector<uint64_t> valid;
  std::vector<int32_t> excluded(batch * room_.sinks, -1);
  std::vector<int32_t> wanted;
  const int64_t words = words_of(layout_.rows(args.groups));
  bool has_holes = false;
  for (int64_t sequence = 0; sequence < batch; ++sequence) {
    const Candidates& candidates = args.candidates[sequence];
    const PaddingMask& of_sequence = *candidates.valid;
    const int64_t wants = std::max<int64_t>(1, k_ - candidates.fewer);
    wanted.insert(wanted.end(), queries_, static_cast<int32_t>(wants));
    first_rows.push_back(of_sequence.first_valid() / layout_.tokens_a_row);
    has_holes = has_holes || of_sequence.all_valid_from() > of_sequence.first_valid();
    KVSWAP_ASSERT(static_cast<int64_t>(candidates.excluded.size()) <= room_.sinks);
    std::copy(candidates.excluded.begin(), candidates.excluded.end(),
              excluded.begin() + sequence * room_.sinks);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const KeySummary::Chunk& source = summary(args.layer, sequence).chunk(chunk);
      chunk_rows.push_back(source.rows.data());
      if (is_int8) scales.push_back(source.token_scale.data());
    }
  }
  if (has_holes) {
    for (const Candidates& candidates : args.candidates) {
      for (int64_t word = 0; word < words; ++word) {
        valid.push_back(rows_that_count(*candidates.valid, word * kWordRows));
      }
    }
  }
  auto tables = tables_->open(table_bytes(layout_, room_));
  cuda::BatchSelectArgs select;
  select.summary = {.chunks = tables.add(chunk_rows),
                    .scales = is_int8 ? tables.add(scales) : nullptr,
                    .chunks_max = chunks,
                    .chunk_tokens = layout_.chunk,
                    .rank = rows().shape(args.layer).width,
                    .dtype = options().summary_dtype};
  select.query = reinterpret_cast<const float*>(asked_with_.data());
  select.heads = options().score == Score::kSum ? 0 : options().heads;
  select.join = options().score == Score::kMaxMass ? HeadJoin::kMax : HeadJoin::kSum;
  select.first_tokens = tables.add(first_rows);
  select.valid = has_holes ? tables.add(valid) : nullptr;
  select.valid_stride = words;
  select.excluded = tables.add(excluded);
  select.excluded_max = room_.sinks;
  select.indices = reinterpret_cast<int32_t*>(device_answer_.data());
  select.chosen = select.indices + batch * queries_ * k_;
  select.batch = batch;
  select.queries = queries_;
  select.groups = args.groups;
  select.group_tokens = layout_.rows_a_group;
  select.k = k_;
  select.wanted = room_.differs ? tables.add(wanted) : nullptr;
  select.scratch = scratch_.data();
  tables.send();
  device_.launch(select);
}

Status DeviceSelector::finish_choice() {
  if (target_ == nullptr) return Status::ok();
  const auto began = std::chrono::steady_clock::now();
  const Status answered = device_.synchronize(answered_);
  wait_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  auto& chosen = *std::exchange(target_, nullptr);
  KVSWAP_RETURN_IF_ERROR(answered);
  const int64_t batch = sequences();
  const auto* ids = reinterpret_cast<const int32_t*>(answer_);
  const int32_t* counts = ids + batch * queries_ * k_;
  chosen.resize(batch);
  for (int64_t sequence = 0; sequence < batch; ++sequence) {
    std::vector<int32_t>& of_sequence = chosen[sequence];
    of_sequence.clear();
    for (int64_t row = sequence * queries_; row < (sequence + 1) * queries_; ++row) {
      of_sequence.insert(of_sequence.end(), ids + row * k_, ids + row * k_ + counts[row]);
    }
    if (queries_ > 1) {
      std::sort(of_sequence.begin(), of_sequence.end());
      of_sequence.erase(std::unique(of_sequence.begin(), of_sequence.end()), of_sequence.end());
    }
  }
  return Status::ok();
}

}  // namespace kvswap
