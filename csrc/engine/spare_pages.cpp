#include "engine/spare_pages.h"

#include <utility>

namespace kvswap {

Status SparePages::grow(int64_t wanted) {
  while (count() < wanted) {
    KVSWAP_RETURN_IF_ERROR(
        parts_.ledger.charge(sequence_, "the pages and tables of one more sequence"));
    auto created = SequencePages::create(parts_.plan, *parts_.space);
    if (!created.is_ok()) {
      parts_.ledger.release(sequence_);
      return created.status();
    }
    pages_.push_back(std::move(created.value()));
  }
  return Status::ok();
}

void SparePages::release(int64_t wanted) {
  while (count() > wanted) {
    pages_.pop_back();
    parts_.ledger.release(sequence_);
  }
}

std::unique_ptr<SequencePages> SparePages::take() {
  KVSWAP_ASSERT(!pages_.empty());
  std::unique_ptr<SequencePages> taken = std::move(pages_.back());
  pages_.pop_back();
  return taken;
}

void SparePages::give(std::unique_ptr<SequencePages> pages) {
  pages->clear();
  pages_.push_back(std::move(pages));
}

}  // namespace kvswap
