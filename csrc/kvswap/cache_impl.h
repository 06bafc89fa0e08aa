#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "kvswap/cache.h"
#include "kvswap/carried_state.h"
#include "kvswap/engine_calls.h"
#include "kvswap/errors.h"
#include "kvswap/exclusive_call_guard.h"
#include "kvswap/prefill_attention.h"
#include "kvswap/saved_session.h"

namespace kvswap {

/// Where a layer's projection came from.
struct Provenance {
  ProjectionSource source = ProjectionSource::kNone;
  int64_t stands_above = 0;  // positions: an estimate goes when a crop leaves as few
};

/// The engine of a Cache, who may call it, and where its projections came from.
class Cache::Impl {
 public:
  Impl(const CacheOptions& options, std::unique_ptr<Engine> engine)
      : options_(options), engine_(std::move(engine)), projections_(options.shape.layers) {
    options_.ranks = engine_->options().ranks;
    if (!options_.exact) options_.exact = host_exact_attention();
    if (options_.shall_end) engine_->patience().set_question(options_.shall_end);
  }

  /// One call: nobody else is in the cache while it lives.
  class Use {
   public:
    /// `reports`: it changes nothing, and may look at a cache that is broken.
    explicit Use(Impl& impl, bool reports = false)
        : impl_(impl), call_(std::in_place, impl.caller_) {
      if (impl.is_broken_ && !reports) throw broken();
      if (impl.engine_ == nullptr) impl.go_back();
      if (impl.options_.stream) {
        engine().context().space->compute().set_compute_stream(impl.options_.stream());
      }
    }
    ~Use() {
      const bool is_close_due = impl_.caller_.is_close_due();
      call_.reset();
      if (is_close_due) impl_.close();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    Engine& engine() const { return *impl_.engine_; }
    /// For what Engine answers without a Status.
    Engine& engine(int64_t layer) const {
      const int64_t layers = engine().options().layers;
      if (layer < 0 || layer >= layers) {
        throw std::invalid_argument("session: layer must be 0.." + std::to_string(layers - 1) +
                                    ", got " + std::to_string(layer));
      }
      return engine();
    }

   private:
    Impl& impl_;
    std::optional<ExclusiveCallGuard::Call> call_;
  };

  /// An allocation failed in the middle of a call, and what that has left cannot be known: no call
  /// but close() follows. Throws.
  [[noreturn]] void ran_out_of_memory() {
    is_broken_ = true;
    throw broken();
  }

  const CacheOptions& options() const { return options_; }
  const ExactAttention& exact() const { return *options_.exact; }

  /// Over positions that are appended.
  void attend(const AttendArgs& args) {
    const int64_t queries = args.query.queries;
    if (!engine_->exact_chunks().takes(args.layer)) {
      throw_status(engine_->attend(args));
      return;
    }
    const int64_t positions = engine_->positions(args.layer);
    if (queries > positions) {
      throw std::invalid_argument("attend: query must be of the " + std::to_string(positions) +
                                  " positions in the layer, got " + std::to_string(queries));
    }
    throw_status(
        attend_exactly(*engine_, {.attention = args, .past = positions - queries}, exact()));
  }

  void close() noexcept {
    const auto stop = [this] {
      const std::lock_guard held(exchange_);
      if (engine_ != nullptr) engine_->patience().stop();
    };
    if (!caller_.close(stop)) return;
    engine_.reset();
    carried_.reset();
    caller_.closed();
  }

  /// In a call.
  void divide(const CacheOptions& given) {
    CacheOptions divided = options_;
    divided.ranks = given.ranks;
    divided.budget.kv_memory_bytes = given.budget.kv_memory_bytes;
    divided.settings.rank = given.settings.rank;
    divided.settings.summary_dtype = given.settings.summary_dtype;
    divided.settings.groups_max = given.settings.groups_max;
    divided.settings.pages_max = given.settings.pages_max;
    divided.settings.resident_layers = given.settings.resident_layers;
    const EngineOptions next = engine_options(divided);
    throw_status(next.validate());
    check_ranks(next.ranks);
    // Of both divisions all records are read: what cannot be read is found while one stands.
    throw_status(engine_->read_all());
    carried_ = std::make_unique<CarriedState>(*engine_, CarriedState::Summaries::kMadeAgain);
    take(nullptr);
    try {
      take(open_carried(next));
    } catch (...) {
      try_to_go_back();
      throw;
    }
    options_ = std::move(divided);
    options_.ranks = next.ranks;
    carried_.reset();
  }

  // Of projections. In a call.

  Provenance& projection(int64_t layer) { return projections_[layer]; }
  /// What a saved cache has brought.
  void find_projections() {
    if (engine_->options().ranks.empty()) return;  // its rows have none
    for (size_t layer = 0; layer < projections_.size(); ++layer) {
      if (!engine_->context().selector->is_ready(static_cast<int64_t>(layer))) continue;
      projections_[layer].source =
          options_.is_calibrated ? ProjectionSource::kGiven : ProjectionSource::kEstimated;
    }
  }
  /// The layers have so many positions now.
  void forget_estimates(int64_t positions) {
    for (Provenance& each : projections_) {
      if (each.source == ProjectionSource::kEstimated && positions <= each.stands_above) each = {};
    }
  }
  ProjectionSource best_projection() const {
    ProjectionSource best = ProjectionSource::kNone;
    for (const Provenance& each : projections_) best = std::max(best, each.source);
    return best;
  }

  /// Another one that goes on from here.
  std::unique_ptr<Impl> fork() {
    auto forked = std::make_unique<Impl>(options_, fork_engine(*engine_, options_.threads));
    forked->projections_ = projections_;
    return forked;
  }

 private:
  /// A projection has parts of lower ranks alone.
  void check_ranks(const std::vector<int64_t>& ranks) const {
    const std::vector<int64_t>& held = engine_->options().ranks;
    for (size_t layer = 0; layer < ranks.size(); ++layer) {
      if (ranks[layer] <= held[layer]) continue;
      if (projections_[layer].source == ProjectionSource::kNone) continue;
      throw std::invalid_argument("divide: layer " + std::to_string(layer) +
                                  " must have a rank of at most " + std::to_string(held[layer]) +
                                  ", which its projection has, got " +
                                  std::to_string(ranks[layer]));
    }
  }
  /// Another thread's close() may look at the engine meanwhile.
  void take(std::unique_ptr<Engine> engine) {
    if (engine != nullptr && options_.shall_end) {
      engine->patience().set_question(options_.shall_end);
    }
    const std::lock_guard held(exchange_);
    std::swap(engine_, engine);
  }
  std::unique_ptr<Engine> open_carried(const EngineOptions& options) const try {
    return carried_->open(options, options_.threads);
  } catch (const std::bad_alloc&) {
    throw SessionError(SessionError::Kind::kStorage,
                       "session: memory must be divided anew, and an allocation failed; free "
                       "memory, and make the call again",
                       ENOMEM);
  }
  /// With the division that there was before.
  void go_back() {
    take(open_carried(engine_options(options_)));
    carried_.reset();
  }
  void try_to_go_back() {
    try {
      go_back();
    } catch (const std::exception&) {
      // The next call tries it again, and throws what it meets.
    }
  }

  static SessionError broken() {
    return {SessionError::Kind::kStorage,
            "session: must be closed, since memory ran out in the middle of an earlier call; close "
            "it, free memory, and open another one",
            ENOMEM};
  }

  CacheOptions options_;
  std::mutex exchange_;  // of the engine
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<CarriedState> carried_;  // while there is no engine
  std::vector<Provenance> projections_;    // [layers]
  ExclusiveCallGuard caller_;
  std::atomic<bool> is_broken_ = false;
};

}  // namespace kvswap
