#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "io/anonymous_file.h"
#include "kvswap/saved_state.h"

namespace kvswap {

/// What an engine of this process holds, for another one that continues it: its files of
/// records, and all the rest in a file without a name.
///
/// The engine goes on, too, or is destroyed. Thread rules: one thread at a time.
class CarriedState {
 public:
  /// What becomes of summaries that are made by projections.
  enum class Summaries {
    kShared,     // they are the engine's, which must live until open()
    kMadeAgain,  // from the records, by as many first columns of the projections as ranks say
  };

  /// Writes to the engine's directory. Throws as throw_status() does: then the engine is as it was.
  CarriedState(Engine& engine, Summaries summaries);

  /// An engine that continues it; may be called again. options: of the engine that it is of;
  /// where summaries are made again perhaps with lower ranks, other rows, groups, pages and budget.
  std::unique_ptr<Engine> open(EngineOptions options, ParallelFor parallel) const;

 private:
  /// A file without a name is zeros when it ends, where that is asked. Where it fails a line is
  /// logged.
  struct WipedAtEnd {
    ~WipedAtEnd();
    int fd = -1;  // -1: it is left as it is
    std::string directory;
  };

  OwnedFd file_;
  WipedAtEnd wiped_;
  SnapshotWriter::Shared shared_;  // its tensors are in the file
  std::unique_ptr<SavedState> state_;
  std::vector<int64_t> ranks_;  // of the projections; none: nothing is made again
};

}  // namespace kvswap
