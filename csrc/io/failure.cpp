#include "io/failure.h"

#include <cerrno>

namespace kvswap {

Failure failure_of(int error_number) {
  switch (error_number) {
    // What everybody is short of for a while.
    case EAGAIN:
    case EINTR:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
    case ENOBUFS:
    case ENOLCK:
    case ENOSPC:
    case EDQUOT:
    // Somebody else is at it.
    case EBUSY:
    case ETXTBSY:
    // A disk, or what is between.
    case EIO:
    case ETIMEDOUT:
    case ESTALE:
    case ENODEV:
    case ENXIO:
    case ENOTCONN:
      return Failure::kPassing;
    default:
      return Failure::kPermanent;
  }
}

Failure failure_of(const Status& status) {
  switch (status.code()) {
    case StatusCode::kCorrupt:
      return Failure::kDamage;
    case StatusCode::kLate:
    case StatusCode::kInterrupted:
      return Failure::kPassing;
    case StatusCode::kOk:
    case StatusCode::kInvalid:
    case StatusCode::kBudget:
    case StatusCode::kStorage:
    case StatusCode::kDropped:
      break;
  }
  return failure_of(status.error_number());
}

const char* failure_name(Failure failure) {
  switch (failure) {
    case Failure::kPassing:
      return "passing";
    case Failure::kPermanent:
      return "permanent";
    case Failure::kDamage:
      return "damage";
  }
  return "";
}

}  // namespace kvswap
