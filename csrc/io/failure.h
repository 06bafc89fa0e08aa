#pragma once

#include "io/status.h"

namespace kvswap {

/// What a failure says of what was asked for. One table for all: a Status, Python's exceptions and
/// what a server does with a saved cache follow it.
enum class Failure {
  kPassing,    ///< a lack, a limit or a disk that may answer again: the same call may succeed later
  kPermanent,  ///< it stays until a person changes something: rights, a path, a setting
  kDamage,     ///< bytes are not the ones that were written; nothing helps but to make them anew
};

/// Of a system call's errno. No errno is damage.
Failure failure_of(int error_number);

/// Of a Status that is not ok.
Failure failure_of(const Status& status);

/// "passing", "permanent" or "damage".
const char* failure_name(Failure failure);

}  // namespace kvswap
