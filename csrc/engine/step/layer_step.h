#pragma once

#include <cstdint>
#include <utility>

#include "engine/engine_context.h"
#include "engine/sequence/batch.h"
#include "engine/sequence/sealer.h"
#include "engine/step/layer_prefetch.h"
#include "engine/step/selection_override.h"
#include "engine/step/step_reads.h"

namespace kvswap {

/// The query of one decoding step.
struct AttentionQuery {
  QueryView query;
  float scale = 1.0f;    // of attention
  int64_t since_ns = 0;  // when its prediction began, of the timeline's clock; 0: it is none
};

/// One layer's part of a decoding step: select groups, assign pages, read what is missing.
///
///   kIdle --select--> kSelecting --finish_selection--> kSelected --submit_reads--> kReading
///   kReading --complete--> kReady
///
/// A prediction goes the same way up to submit_reads(), and is kIdle again then: its reads and
/// those of the last selection are in flight while the layer's own query selects. Groups that are
/// in memory by then are used. Groups that were prefetched in vain stay in the reuse buffer like
/// any other page.
///
/// take() consumes a step in kReading or kReady; its pages may then be attended. drop() returns to
/// kIdle from any state. An asynchronous error moves to kFailed and is returned once, by take(). A
/// returned error leaves kIdle, except Status::is_pending(): the reads stay in flight, and the next
/// call waits for them. The last selection remains readable.
///
/// The selector serves one query at a time, so at most one layer is in kSelecting. A layer in
/// kSelecting or kSelected is not dropped. Not thread-safe.
class LayerStep {
 public:
  enum class State { kIdle, kSelecting, kSelected, kReading, kReady, kFailed };
  enum class Purpose { kSelection, kPrefetch };

  /// fetch: as of StepReads.
  LayerStep(int64_t layer, EngineContext& context, const Batch& batch, Sealer& sealer, Fetch& fetch)
      : layer_(layer),
        context_(context),
        batch_(batch),
        reads_(layer, context, batch, sealer, fetch),
        prefetch_(layer, context, batch, reads_),
        override_(layer, context, batch) {}
  LayerStep(const LayerStep&) = delete;
  LayerStep& operator=(const LayerStep&) = delete;

  State state() const { return state_; }
  /// Does anything of its own stand in its pages, or is on the way there, that is yet to be
  /// attended?
  bool has_pages() const { return is_read() || prefetch_.is_reading(); }
  /// Passes the query to the selector, if the layer selects. Of a prediction that is prefetched
  /// alone only a wrong call is an error; otherwise a step that cannot select is idle.
  Status select(const AttentionQuery& question, Purpose purpose = Purpose::kSelection);
  /// Is the query in kSelecting, or the selection in kSelected, a prediction?
  bool is_predicting() const {
    return is_prediction_ && (state_ == State::kSelecting || state_ == State::kSelected);
  }
  /// Takes the selection of a prediction; false: there is none, and the step is idle.
  bool finish_prediction();
  /// Waits for the selector; another layer may select then.
  Status finish_selection();
  /// Turns the selection, made now if it is not yet, into a plan, and submits its reads. A prefetch
  /// that cannot be made is counted and reports no error: the layer's own selection reads again.
  Status submit_reads(const SpaceRequest& space);
  /// Submits reads of the last selection, most of which will be selected again: while the step is
  /// idle, for a layer whose pages other layers had since. A read that fails is made
  /// again by the layer's own step.
  void reload_last_selection(const SpaceRequest& space) { prefetch_.begin(space, chosen_); }
  /// Would choose() wait for the selector?
  bool is_choosing() const { return is_asking_selector_ && context_.selector->is_choosing(); }
  /// The loads are in their pages, those of a prefetch too.
  Status complete();
  Status take();
  /// Fails only when what is being read cannot be waited for: it stays reading.
  Status drop();
  /// Nobody waits for what went wrong: the next take() reports it.
  void fail(Status error);
  /// Of the step that take() has ended: what its prediction took, and how long it has waited.
  void report() { prefetch_.report(reads_.take_waited_seconds()); }

  /// Was it made for the `queries` newest positions of what the layer holds now?
  bool is_for(int64_t queries) const;
  /// Overrides the next selection, which still runs (its cost counts), and the next predicted one
  /// where `predicted` is not empty.
  Status override_with(Groups groups, Groups predicted) {
    return override_.set(std::move(groups), std::move(predicted));
  }
  /// Forgets what was chosen, and what was to replace it: the groups' numbers mean others now.
  void forget_selection();

  const Groups& chosen() const { return chosen_; }
  /// What the session chose last that this one goes on from.
  void set_chosen(Groups chosen) { chosen_ = std::move(chosen); }
  /// With new_group_ratio, what the step before attended, one choice a sequence; empty: there is
  /// none, since a chunk or an edit came between.
  const Groups& last() const { return last_; }
  void set_last(Groups last) { last_ = std::move(last); }
  /// [batch][groups]: of the sequence's pool.
  const std::vector<std::vector<int32_t>>& pages() const { return reads_.pages(); }

 private:
  Status end();
  bool is_read() const { return state_ == State::kReading || state_ == State::kReady; }
  Status start_selection(const AttentionQuery& question);
  Status drop_prediction(Status error);
  void count_selecting(double spent, double seconds);
  void plan();

  int64_t layer_;
  EngineContext& context_;
  const Batch& batch_;
  StepReads reads_;
  LayerPrefetch prefetch_;
  SelectionOverride override_;
  State state_ = State::kIdle;
  Status failure_;  // while failed
  bool is_asking_selector_ = false;
  bool is_prediction_ = false;  // what was asked last
  Batch::Layer made_for_;       // the layer when it was asked
  Groups chosen_;
  Groups last_;  // with new_group_ratio: what the step before attended
};

}  // namespace kvswap
