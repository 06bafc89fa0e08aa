#include "engine/sequence/sequence_pool.h"

#include <utility>

namespace kvswap {

Status SequencePool::grow(int64_t wanted) {
  while (count() < wanted) {
    KVSWAP_RETURN_IF_ERROR(
        context_.ledger.charge(sequence_, "the pages and tables of one more sequence"));
    auto created = SequencePages::create(context_.plan, *context_.space);
    if (!created.is_ok()) {
      context_.ledger.release(sequence_);
      return created.status();
    }
    pages_.push_back(std::move(created.value()));
  }
  return Status::ok();
}

void SequencePool::release(int64_t wanted) {
  while (count() > wanted) {
    pages_.pop_back();
    context_.ledger.release(sequence_);
  }
}

std::unique_ptr<SequencePages> SequencePool::take() {
  KVSWAP_ASSERT(!pages_.empty());
  std::unique_ptr<SequencePages> taken = std::move(pages_.back());
  pages_.pop_back();
  return taken;
}

void SequencePool::give(std::unique_ptr<SequencePages> pages) {
  pages->clear();
  pages_.push_back(std::move(pages));
}

}  // namespace kvswap
