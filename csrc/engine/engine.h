#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/engine_options.h"
#include "engine/fetcher.h"
#include "engine/page_space.h"
#include "engine/sequence_pages.h"
#include "io/timeline.h"
#include "kernels/records.h"
#include "memory/ledger.h"
#include "methods/low_rank_selector.h"
#include "store/record_store.h"

namespace kvswap {

/// New K and V of a layer: [batch, kv_heads, tokens, head_dim], head_dim contiguous.
struct KeyValueView {
  const void* keys = nullptr;
  const void* values = nullptr;
  int64_t key_batch_stride = 0;  // elements, as all strides
  int64_t key_head_stride = 0;
  int64_t key_token_stride = 0;
  int64_t value_batch_stride = 0;
  int64_t value_head_stride = 0;
  int64_t value_token_stride = 0;
  int64_t batch = 0;
  int64_t tokens = 0;
};

struct AttendArgs {
  int64_t layer = 0;
  QueryView query;         // all heads
  void* output = nullptr;  // [batch, queries, heads, head_dim] contiguous
  float scale = 1.0f;
};

struct EngineCounters {
  uint64_t steps = 0;            // attend() calls that selected
  uint64_t sequences = 0;        // summed over steps
  uint64_t groups_attended = 0;  // selected groups, sinks and tail not counted
  uint64_t groups_loaded = 0;
  uint64_t records_sealed = 0;
  double select_seconds = 0;  // project, score, choose
  double plan_seconds = 0;    // page maps, merging, submitting
  double attend_seconds = 0;  // the attention kernel
  double append_seconds = 0;  // packing, summarising, handing to the writer
};

/// One generation's KV cache on raw pointers: score -> select -> plan -> read -> attend.
///
/// The torch-free heart; csrc/torch/session.h is its public face and documents the order of calls.
/// Everything is allocated when the batch is known and charged to the ledger before. A Status other
/// than ok from append() means that nothing of it was kept in the layer, unless the disk failed
/// while writing behind: that error stays and every later call returns it.
///
/// Thread rules: one thread at a time; kernels use the given ParallelFor.
class Engine {
 public:
  static Result<std::unique_ptr<Engine>> create(const EngineOptions& options, ParallelFor parallel);
  ~Engine();

  /// Validity of the next columns: [batch, tokens], true where the token counts.
  Status declare(int64_t batch, int64_t tokens, const bool* valid);
  /// What append() of a chunk longer than select_queries_max checks and makes room for, ahead of
  /// it: whoever attends over the chunk in between computes while the chunk is written.
  Status prepare(int64_t layer, int64_t batch, int64_t tokens);
  Status append(int64_t layer, const KeyValueView& tokens);
  /// Chooses, plans and submits what `layer` will need; see Session::look_ahead(). On a device the
  /// choice goes on beside the caller: the next call plans and submits, and what fails then is told
  /// by attend().
  Status look_ahead(int64_t layer, const QueryView& query);
  /// Replaces the layer's next choice, made all the same, by these groups: see
  /// Session::override_selection().
  Status override_selection(int64_t layer, std::vector<std::vector<int32_t>> groups);
  /// Attention of the last query.queries columns over sinks, chosen groups and tail, then seals
  /// what has left the tail. queries <= select_queries_max.
  Status attend(const AttendArgs& args);

  /// Copies columns [begin, end) of one sequence to [kv_heads, end - begin, head_dim] arrays of the
  /// host.
  Status read_back(int64_t layer, int64_t sequence, int64_t begin, int64_t end, void* keys,
                   void* values);

  /// Begins to read `count` sealed groups of a sequence to `target` ([count, record_bytes],
  /// aligned to 4096); finish_groups() waits for them and verifies. `fetch` stays where it is.
  Status start_groups(int64_t layer, int64_t sequence, int64_t first_group, int64_t count,
                      std::byte* target, Fetch& fetch);
  Status finish_groups(Fetch& fetch) { return fetcher_->finish(fetch); }
  /// Room for two blocks of past_block_groups(), kept from call to call; one PastStream at a time.
  Result<std::shared_ptr<std::byte>> past_blocks();

  bool has_projection(int64_t layer) const { return selector_->has_projection(layer); }
  bool needs_projection(int64_t layer) const;
  Status set_projection(int64_t layer, int64_t rank, const float* keys, const float* queries);

  Status select_sequences(std::span<const int64_t> indices);
  Status crop(int64_t columns);
  void reset();

  const EngineOptions& options() const { return options_; }
  int64_t columns(int64_t layer) const { return layers_[layer].columns; }
  int64_t sealed_groups(int64_t layer) const { return layers_[layer].sealed_groups; }
  int64_t batch() const { return static_cast<int64_t>(sequences_.size()); }
  int64_t record_bytes() const { return store_->record_bytes(); }
  const TokenValidity& validity(int64_t sequence) const { return validity_[sequence]; }
  const std::vector<std::vector<int32_t>>& last_selection(int64_t layer) {
    settle_choice();
    return layers_[layer].step.chosen;
  }
  /// The caller's stream on the device from now on.
  void set_compute_stream(void* stream) { space_->set_compute_stream(stream); }
  const Ledger& ledger() const { return ledger_; }
  const EngineCounters& counters() const { return counters_; }
  const Fetcher& fetcher() const { return *fetcher_; }
  Timeline* timeline() const { return timeline_.get(); }  // null: nothing is recorded
  const RecordStore& store() const { return *store_; }
  PageSpace& space() const { return *space_; }
  const DataFile& file() const { return *file_; }
  const std::vector<std::string>& fallbacks() const { return fallbacks_; }

 private:
  /// What look_ahead() leaves for attend().
  struct Step {
    bool is_planned = false;
    bool has_landed = false;  // the loads are in their pages
    Status failure;           // of a plan that was made after look_ahead() had returned
    int64_t columns = 0;      // of the layer when it was planned
    int64_t sealed_groups = 0;
    std::vector<std::vector<int32_t>> chosen;      // [batch][groups], rising
    std::vector<std::vector<int32_t>> pages;       // [batch][groups]: of the sequence's pool
    std::vector<std::vector<int32_t>> overriding;  // empty: nothing overrides the next choice
    Fetch fetch;
  };
  struct Layer {
    int64_t columns = 0;
    int64_t sealed_groups = 0;
    Step step;
  };
  struct PageTable;

  Engine(const EngineOptions& options, ParallelFor parallel);
  Status open();
  Status check_process() const;
  Status check_layer(int64_t layer) const;
  Status begin(int64_t batch, int64_t tokens);
  Status allocate(int64_t batch);
  Status grow_spare(int64_t count);
  void release_spare(int64_t count);
  Status check_room(int64_t batch, int64_t context) const;
  Status reserve_space(int64_t batch, int64_t groups);

  // append.cpp
  int64_t due_groups(int64_t layer, int64_t columns) const;
  Status charge_growth(int64_t layer, int64_t columns);
  void take_back(int64_t layer, int64_t groups);
  Status append_prepared(int64_t layer, const KeyValueView& tokens);
  Status append_chunk(int64_t layer, const KeyValueView& tokens);
  void fill_tail(int64_t layer, const KeyValueView& tokens, int64_t first_token, int64_t count,
                 int64_t first_column);
  Status seal_from_tail(int64_t layer);
  Status seal_directly(int64_t layer, const KeyValueView& tokens, int64_t first_token,
                       int64_t groups);
  void pack_run(const RecordStore::StagedRun& run, const KeyValueView& tokens, int64_t sequence,
                int64_t first_token);
  cuda::BatchTransferArgs transfer_of(const KeyValueView& tokens) const;
  KeyView key_view(const std::byte* record) const;
  bool is_sink(int64_t sequence, int64_t group) const;
  void pin_sink(int64_t layer, int64_t sequence, int64_t group, const std::byte* record);

  // step.cpp
  Status start_choice(int64_t layer, const QueryView& query);
  Status finish_choice();
  void settle_choice();
  void choose_all(int64_t layer, int64_t sequence);
  void apply_override(int64_t layer);
  bool is_pinned(int64_t layer, int64_t sequence, int64_t group) const;
  Status submit(int64_t layer);
  void make_landing_room(int64_t layer);
  Status land(int64_t layer);
  Status finish(int64_t layer);
  Status handed_back(Status status);
  void forget_loads(int64_t layer);
  void drop_step(int64_t layer);
  void drop_steps();
  int64_t choosable_groups(int64_t layer, int64_t sequence) const;
  bool fits(int64_t layer, int64_t sequence) const;
  bool all_fit(int64_t layer) const;
  void build_page_table(int64_t layer, PageTable& table);
  void run_attention(const AttendArgs& args, const PageTable& table);
  Status seal_overflow(int64_t layer);

  // seal.cpp
  Result<RecordStore::StagedRun> stage(int64_t layer, int64_t count);
  Status commit(RecordStore::StagedRun run, std::span<const int64_t> sequences);
  Status hand_over_oldest();
  Status settle_seals();
  Status settle_seals_of(int64_t layer);

  // edit.cpp
  Status crop_layer(int64_t layer, int64_t columns);
  Status load_groups(int64_t layer, int64_t sequence, int64_t first_group, int64_t count,
                     std::byte* target);
  Status summarise(int64_t layer, int64_t rank, const float* keys, const float* queries);
  Status charge_batch(int64_t batch);
  void settle_charges();

  uint64_t mask(int64_t layer, int64_t sequence, int64_t group) const;
  EngineOptions options_;
  ParallelFor parallel_;
  int owner_pid_;
  Ledger ledger_;
  std::vector<std::string> fallbacks_;
  std::unique_ptr<Timeline> timeline_;  // before those that record in it
  std::unique_ptr<DataFile> file_;
  std::unique_ptr<RecordStore> store_;
  std::unique_ptr<PageSpace> space_;
  std::unique_ptr<LowRankSelector> selector_;
  std::unique_ptr<Fetcher> fetcher_;
  std::vector<std::unique_ptr<SequencePages>> sequences_;  // [batch]
  std::vector<std::unique_ptr<SequencePages>> spare_;      // allocated, not in the batch now
  std::vector<TokenValidity> validity_;                    // [batch]
  std::vector<Layer> layers_;
  std::shared_ptr<std::byte> past_blocks_;
  std::unique_ptr<PageTable> table_;
  std::deque<RecordStore::StagedRun> sealing_;  // on their way from the device, oldest first
  int64_t choosing_ = -1;                       // the layer whose choice is under way
  bool is_asked_ = false;                       // by the selector
  int64_t prepared_ = -1;                       // the layer that prepare() was called for
  int64_t reserved_batch_ = 0;                  // reserve_space()'s largest
  int64_t reserved_groups_ = 0;
  int64_t scored_bytes_ = 0;  // charged for scores so far
  EngineCounters counters_;
};

}  // namespace kvswap
