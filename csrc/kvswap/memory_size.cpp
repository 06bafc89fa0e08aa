#include "kvswap/memory_size.h"

#include <cctype>
#include <cmath>
#include <cstdio>
#include <limits>

#include "kvswap/errors.h"

namespace kvswap {
namespace {

using Wide = unsigned __int128;
constexpr int kDigitsMax = 18;  // after the point; those after them are dropped

/// 0 for a word that is no unit.
Wide unit_bytes(std::string unit) {
  if (unit.empty() || unit == "B") return 1;
  const size_t power = std::string("KMGT").find(unit[0]);
  if (power == std::string::npos) return 0;
  const std::string rest = unit.substr(1);
  if (!rest.empty() && rest != "B" && rest != "IB") return 0;
  Wide bytes = 1;
  for (size_t i = 0; i <= power; ++i) bytes *= rest == "B" ? 1000 : 1024;
  return bytes;
}

std::string trimmed(const std::string& text) {
  const char* spaces = " \t\n\r\f\v";
  const size_t begin = text.find_first_not_of(spaces);
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(spaces) - begin + 1);
}

/// Takes digits off the front of `text` from `at` on.
std::string take_digits(const std::string& text, size_t& at) {
  const size_t begin = at;
  while (at < text.size() && text[at] >= '0' && text[at] <= '9') ++at;
  return text.substr(begin, at - begin);
}

Wide number_of(const std::string& digits) {
  Wide value = 0;
  for (const char digit : digits) value = value * 10 + (digit - '0');
  return value;
}

}  // namespace

int64_t parse_bytes(const std::string& size, const std::string& where) {
  const std::string text = trimmed(size);
  size_t at = 0;
  std::string whole = take_digits(text, at);
  std::string part;
  if (at < text.size() && text[at] == '.') part = take_digits(text, ++at);
  const bool has_number = !whole.empty() || !part.empty();
  while (at < text.size() && std::isspace(static_cast<unsigned char>(text[at]))) ++at;
  std::string unit = text.substr(at);
  for (char& letter : unit) letter = static_cast<char>(std::toupper(letter));
  const Wide bytes = unit_bytes(unit);
  if (!has_number || bytes == 0) {
    throw ConfigError(where +
                      ": must be a number with a unit such as 512MiB, 1.5GB or 65536, got '" +
                      size + "'");
  }
  whole.erase(0, std::min(whole.find_first_not_of('0'), whole.size()));
  part.resize(kDigitsMax, '0');
  const bool is_long = whole.size() > kDigitsMax + 1;
  const Wide count =
      is_long ? 0 : number_of(whole) * bytes + number_of(part) * bytes / 1'000'000'000'000'000'000u;
  if (is_long || count < 1 || count > std::numeric_limits<int64_t>::max()) {
    throw ConfigError(where + ": must be between 1 byte and 2**63 - 1, got '" + size + "'");
  }
  return static_cast<int64_t>(count);
}

std::string format_bytes(double count) {
  char text[32];
  if (std::abs(count) < 1024) {
    std::snprintf(text, sizeof(text), "%.0f B", count);
    return text;
  }
  for (const char* unit : {"KiB", "MiB", "GiB"}) {
    count /= 1024;
    if (std::abs(count) >= 1024) continue;
    std::snprintf(text, sizeof(text), std::abs(count) < 100 ? "%.2f %s" : "%.1f %s", count, unit);
    return text;
  }
  std::snprintf(text, sizeof(text), "%.2f TiB", count / 1024);
  return text;
}

}  // namespace kvswap
