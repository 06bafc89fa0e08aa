#pragma once

#include <cstdint>
#include <utility>

#include "engine/batch.h"
#include "engine/choice_override.h"
#include "engine/engine_parts.h"
#include "engine/layer_prefetch.h"
#include "engine/sealer.h"
#include "engine/step_reads.h"

namespace kvswap {

/// What a step is asked with.
struct Question {
  QueryView query;
  float scale = 1.0f;    // of attention
  int64_t since_ns = 0;  // when its prediction began, of the timeline's clock; 0: it is none
};

/// One layer's step, from the question to the pages: who is chosen, where they stand, and what is
/// being read.
///
///   idle --ask--> asked --choose--> chosen --answer--> reading --land--> ready
///
/// A step that is only predicted goes the same way until it is answered, and is idle again then:
/// what the predicted query chose is being read, beside what was chosen last, and the step is asked
/// anew with its own query. What is there then is used, and what was read in vain stays in the
/// reuse buffer as long as any other page.
///
/// take() ends a step that is reading or ready: its pages may be attended. drop() makes it idle
/// from any state. An error that nobody waited for makes it failed; take() reports it once. An
/// error that is returned leaves it idle, but for one that is_pending(): what is being read is
/// still in flight, and is waited for again. What was chosen last stays readable.
///
/// Of all layers one at most is asked: the selector answers one question at a time. Who is asked or
/// has chosen is not dropped. Not thread-safe.
class LayerStep {
 public:
  enum class State { kIdle, kAsked, kChosen, kReading, kReady, kFailed };
  enum class Purpose { kChoice, kPrefetch };

  /// fetch: as of StepReads.
  LayerStep(int64_t layer, EngineParts& parts, const Batch& batch, Sealer& sealer, Fetch& fetch)
      : layer_(layer),
        parts_(parts),
        batch_(batch),
        reads_(layer, parts, batch, sealer, fetch),
        prefetch_(layer, parts, batch, reads_),
        override_(layer, parts, batch) {}
  LayerStep(const LayerStep&) = delete;
  LayerStep& operator=(const LayerStep&) = delete;

  State state() const { return state_; }
  /// Does anything of its own stand in its pages, or is on the way there, that is yet to be
  /// attended?
  bool has_pages() const { return is_read() || prefetch_.is_reading(); }
  /// Asks the selector, where there is a choice. With a predicted query whose choice is prefetched
  /// alone only a wrong call is an error; else a step that could not be asked is idle.
  Status ask(const Question& question, Purpose purpose = Purpose::kChoice);
  /// Is what was asked, or chosen, a prediction?
  bool is_predicting() const {
    return is_prediction_ && (state_ == State::kAsked || state_ == State::kChosen);
  }
  /// Takes the selector's answer to it; false: there is none, and the step is idle.
  bool finish_prediction();
  /// Takes the selector's answer, for which it waits: another layer may ask.
  Status choose();
  /// The choice, made now if it is not yet, becomes a plan, and its reads are submitted. A prefetch
  /// that cannot be made is counted, and reports no error: who attends reads again.
  Status answer(const Room& make_room);
  /// Begins to read what was chosen last, most of which will be chosen again: while the step is
  /// idle, for a layer whose pages others had since. What it cannot read is read by its own turn.
  void recall(const Room& make_room) { prefetch_.begin(make_room, chosen_); }
  /// Would choose() wait for the selector?
  bool is_choosing() const { return is_asking_selector_ && parts_.selector->is_choosing(); }
  /// The loads are in their pages, those of a prefetch too.
  Status land();
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
  void forget_choice();

  const Groups& chosen() const { return chosen_; }
  /// What the session chose last that this one goes on from.
  void set_chosen(Groups chosen) { chosen_ = std::move(chosen); }
  /// [batch][groups]: of the sequence's pool.
  const std::vector<std::vector<int32_t>>& pages() const { return reads_.pages(); }

 private:
  bool is_read() const { return state_ == State::kReading || state_ == State::kReady; }
  Status start_choice(const Question& question);
  Status drop_prediction(Status error);
  void count_selecting(double spent, double seconds);
  void plan();

  int64_t layer_;
  EngineParts& parts_;
  const Batch& batch_;
  StepReads reads_;
  LayerPrefetch prefetch_;
  ChoiceOverride override_;
  State state_ = State::kIdle;
  Status failure_;  // while failed
  bool is_asking_selector_ = false;
  bool is_prediction_ = false;  // what was asked last
  Batch::Layer made_for_;       // the layer when it was asked
  Groups chosen_;
};

}  // namespace kvswap
