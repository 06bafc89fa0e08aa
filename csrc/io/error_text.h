#pragma once

#include <string>

namespace kvswap {

/// "Input/output error (errno 5)".
std::string errno_text(int error_number);

/// The likely cause and remedy of a failed read or write, as "; ..." or empty where none is known.
std::string storage_hint(int error_number);

}  // namespace kvswap
