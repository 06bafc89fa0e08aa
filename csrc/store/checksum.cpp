#include "store/checksum.h"

#include <array>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvswap {

uint64_t checksum_of(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

struct RunningChecksum::State {
  State() { XXH3_64bits_reset(&state); }
  void add(const void* data, size_t bytes) { XXH3_64bits_update(&state, data, bytes); }
  uint64_t value() const { return XXH3_64bits_digest(&state); }

  XXH3_state_t state;
};

RunningChecksum::RunningChecksum() : state_(std::make_unique<State>()) {}

void RunningChecksum::add(std::span<const std::byte> bytes) {
  state_->add(bytes.data(), bytes.size());
}

uint64_t RunningChecksum::value() const { return state_->value(); }

RunningChecksum::~RunningChecksum() = default;

uint32_t record_checksum(std::span<const std::byte> bytes, const RecordOf& of) {
  const std::array<uint64_t, 4> identity = {of.seed, static_cast<uint64_t>(of.layer),
                                            static_cast<uint64_t>(of.group), of.serial};
  const uint64_t mixed = XXH3_64bits(identity.data(), sizeof(identity));
  return static_cast<uint32_t>(XXH3_64bits_withSeed(bytes.data(), bytes.size(), mixed));
}

const char* checksum_name() { return "xxh3"; }

}  // namespace kvswap
