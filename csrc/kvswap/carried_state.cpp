#include "kvswap/carried_state.h"

#include <unistd.h>

#include <utility>

#include "io/secure_erase.h"
#include "kvswap/engine_calls.h"
#include "kvswap/safetensors_writer.h"

namespace kvswap {

CarriedState::WipedAtEnd::~WipedAtEnd() {
  if (fd >= 0)
    wipe_at_end(fd, ::lseek(fd, 0, SEEK_END), "a session's state in '" + directory + "'");
}

CarriedState::CarriedState(Engine& engine, Summaries summaries) {
  const EngineOptions& options = engine.options();
  const bool makes_again = summaries == Summaries::kMadeAgain;
  auto shared = engine.saver().share(makes_again ? SharedRows::kNone : SharedRows::kAll);
  throw_status(shared.status());
  auto file = create_unnamed_file(options.directory);
  if (!file.is_ok()) file = create_and_unlink_file(options.directory);
  throw_status(file.status());
  file_ = std::move(file.value());
  wiped_.directory = options.directory;
  if (options.wipe_on_close) wiped_.fd = file_.get();
  shared_ = std::move(shared.value());
  const auto written = write_safetensors(file_.get(), options.directory, shared_.tensors, {});
  throw_status(written.status());
  shared_.tensors.clear();  // they look at the engine
  state_ = std::make_unique<SavedState>(file_.get(), written.value(),
                                        "the session's state in " + options.directory);
  if (makes_again && engine.context().plan.rows.takes_projections) ranks_ = options.ranks;
}

std::unique_ptr<Engine> CarriedState::open(EngineOptions options, ParallelFor parallel) const {
  options.base = shared_.base;
  auto engine = Engine::create(options, std::move(parallel));
  throw_status(engine.status());
  SnapshotReader& loader = engine.value()->loader();
  throw_status(ranks_.empty() ? loader.load(shared_.counts, *state_, shared_.summaries)
                              : loader.load_narrower(shared_.counts, *state_, ranks_));
  return std::move(engine.value());
}

}  // namespace kvswap
