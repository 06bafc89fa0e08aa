#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/batch.h"
#include "engine/engine_parts.h"
#include "engine/sealer.h"

namespace kvswap {

/// What a step is asked with.
struct Question {
  QueryView query;
  float scale = 1.0f;  // of attention
};

/// Who gives way to a step's reads, while it begins them.
struct Room {
  /// Others that stand in its pages: nothing of theirs is on the way there any more.
  std::function<Status()> of_pages;
  /// Others' loads, which land where these have no place to.
  std::function<Status(int64_t loads)> to_land;
};

/// One layer's step, from the question to the pages: who is chosen, where they stand, and what is
/// being read.
///
///   idle --ask--> asked --choose--> chosen --answer--> reading --land--> ready
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

  /// fetch: of the layer's pages, so of all layers that share them; nobody else's when this one
  /// begins to read.
  LayerStep(int64_t layer, EngineParts& parts, const Batch& batch, Sealer& sealer, Fetch& fetch)
      : layer_(layer), parts_(parts), batch_(batch), sealer_(sealer), fetch_(fetch) {}

  State state() const { return state_; }
  /// Does anything of its own stand in its pages, or is on the way there, that is yet to be
  /// attended?
  bool has_pages() const { return is_read() || is_recalling_; }
  /// Asks the selector, where there is a choice.
  Status ask(const Question& question);
  /// Takes the selector's answer, for which it waits: another layer may ask.
  Status choose();
  /// The choice, made now if it is not yet, becomes a plan, and its reads are submitted.
  Status answer(const Room& make_room);
  /// Begins to read what was chosen last, most of which will be chosen again: while the step is
  /// idle, for a layer whose pages others had since. What it cannot read is read by its own turn.
  void recall(const Room& make_room);
  /// Would choose() wait for the selector?
  bool is_choosing() const { return is_asking_selector_ && parts_.selector->is_choosing(); }
  /// The loads are in their pages, those of a recall too.
  Status land();
  Status take();
  /// Fails only when what is being read cannot be waited for: it stays reading.
  Status drop();
  /// Nobody waits for what went wrong: the next take() reports it.
  void fail(Status error);

  /// Was it made for the `queries` newest positions of what the layer holds now?
  bool is_for(int64_t queries) const;
  /// Overrides the next selection, which still runs (its cost counts): [batch][groups].
  Status override_with(std::vector<std::vector<int32_t>> groups);
  /// Forgets what was chosen, and what was to replace it: the groups' numbers mean others now.
  void forget_choice();

  /// [batch][groups]; pages of clusters by their page_id()
  const std::vector<std::vector<int32_t>>& chosen() const { return chosen_; }
  const std::vector<std::vector<int32_t>>& pages() const { return pages_; }  // [batch][groups]

 private:
  bool is_read() const { return state_ == State::kReading || state_ == State::kReady; }
  Status finish_loads();
  Status end_recall();
  void apply_override();
  void plan();
  size_t plan_loads();
  void take_pages(int64_t sequence, std::span<const PageMap::Assignment> assignments);
  Status submit(const Room& make_room);
  void forget_loads();

  int64_t layer_;
  EngineParts& parts_;
  const Batch& batch_;
  Sealer& sealer_;
  Fetch& fetch_;
  State state_ = State::kIdle;
  Status failure_;  // while failed
  bool is_asking_selector_ = false;
  bool is_recalling_ = false;                     // from idle on, until it is planned
  Batch::Layer made_for_;                         // the layer when it was asked
  std::vector<std::vector<int32_t>> chosen_;      // [batch][groups], rising
  std::vector<std::vector<int32_t>> pages_;       // [batch][groups]: of the sequence's pool
  std::vector<std::vector<int32_t>> overriding_;  // empty: nothing replaces the next choice
};

}  // namespace kvswap
