#include "engine/step/selection_override.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kvswap {

Status SelectionOverride::set(Groups groups, Groups predicted) {
  KVSWAP_RETURN_IF_ERROR(check("groups", groups));
  if (!predicted.empty()) KVSWAP_RETURN_IF_ERROR(check("predicted", predicted));
  selection_ = std::move(groups);
  prediction_ = std::move(predicted);
  return Status::ok();
}

/// Makes them rising, and each once.
Status SelectionOverride::check(const char* name, Groups& groups) const {
  const std::string where = "override_selection: ";
  if (static_cast<int64_t>(groups.size()) != batch_.size()) {
    return Status::invalid(where + name + " must be given for each of " +
                           std::to_string(batch_.size()) + " sequences, got " +
                           std::to_string(groups.size()));
  }
  const int64_t pages_max = context_.options.pages_max;
  for (std::vector<int32_t>& of_sequence : groups) {
    std::sort(of_sequence.begin(), of_sequence.end());
    of_sequence.erase(std::unique(of_sequence.begin(), of_sequence.end()), of_sequence.end());
    if (static_cast<int64_t>(of_sequence.size()) > pages_max) {
      return Status::invalid(where + "a sequence must have at most memory.pages_per_layer (" +
                             std::to_string(pages_max) + ") " + name + ", got " +
                             std::to_string(of_sequence.size()));
    }
  }
  return Status::ok();
}

void SelectionOverride::apply(Groups& set, Groups& groups) const {
  Groups taken = std::exchange(set, {});
  if (static_cast<int64_t>(taken.size()) != batch_.size()) return;
  const int64_t sealed = batch_.layer(layer_).sealed_groups;
  for (int64_t sequence = 0; sequence < batch_.size(); ++sequence) {
    const int64_t first = context_.store->tables().first_group(layer_, sequence);
    std::erase_if(taken[sequence], [&](int32_t group) {
      return group < first || group >= sealed || batch_.is_pinned(layer_, sequence, group);
    });
  }
  groups = std::move(taken);
}

void SelectionOverride::clear() {
  selection_.clear();
  prediction_.clear();
}

}  // namespace kvswap
