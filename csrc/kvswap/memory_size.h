#pragma once

#include <cstdint>
#include <string>

namespace kvswap {

/// Bytes in "512MiB", "1.5GB" or "65536": B, KiB to TiB (powers of 1024; K, M, G, T mean the same)
/// or KB to TB (powers of 1000), in any case. `where` begins the message of the ConfigError.
int64_t parse_bytes(const std::string& size, const std::string& where);

/// Three or four digits: format_bytes(3 << 19) is "1.50 MiB".
std::string format_bytes(double count);

}  // namespace kvswap
