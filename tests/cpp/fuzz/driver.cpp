// Stands in for libFuzzer: replays a corpus, then mutates it from a fixed seed.
//
//   fuzz_merge corpus/merge [-max_total_time=10] [-seed=1]

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "fuzz_target.h"

namespace {

using Bytes = std::vector<uint8_t>;
Bytes current;  // for the report of a crash

void run(Bytes bytes) {
  current = std::move(bytes);
  LLVMFuzzerTestOneInput(current.data(), current.size());
}

/// Where the input that ends the process is found again.
void write_finding() {
  std::ofstream("fuzz-finding", std::ios::binary)
      .write(reinterpret_cast<const char*>(current.data()),
             static_cast<std::streamsize>(current.size()));
}

void on_abort(int) {
  write_finding();
  std::fprintf(stderr, "the input is in ./fuzz-finding, %zu bytes\n", current.size());
  std::_Exit(1);
}

Bytes mutated(const std::vector<Bytes>& corpus, std::mt19937_64& random) {
  const auto draw = [&](size_t below) { return static_cast<size_t>(random() % below); };
  Bytes bytes = corpus[draw(corpus.size())];
  for (size_t turn = 0, refreshes = 1 + draw(6); turn < refreshes; ++turn) {
    const size_t at = bytes.empty() ? 0 : draw(bytes.size());
    const auto place = bytes.begin() + static_cast<ptrdiff_t>(at);
    const size_t kind = draw(5);
    if (kind == 0 && !bytes.empty()) {
      bytes[at] ^= static_cast<uint8_t>(1 << draw(8));
    } else if (kind == 1) {
      bytes.insert(place, static_cast<uint8_t>(random()));
    } else if (kind == 2 && !bytes.empty()) {
      bytes.erase(place, place + static_cast<ptrdiff_t>(1 + draw(bytes.size() - at)));
    } else if (kind == 3 && !bytes.empty()) {
      const Bytes piece(place, place + static_cast<ptrdiff_t>(1 + draw(bytes.size() - at)));
      bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(draw(bytes.size())), piece.begin(),
                   piece.end());
    } else {
      const Bytes& other = corpus[draw(corpus.size())];
      const size_t from = other.empty() ? 0 : draw(other.size());
      bytes.resize(at);
      bytes.insert(bytes.end(), other.begin() + static_cast<ptrdiff_t>(from), other.end());
    }
    if (bytes.size() > 65536) bytes.resize(65536);
  }
  return bytes;
}

}  // namespace

int main(int count, char** arguments) {
  double seconds = 5;
  uint64_t seed = 1;
  std::vector<Bytes> corpus = {{}};
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    if (argument.starts_with("-max_total_time=")) {
      seconds = std::stod(argument.substr(16));
    } else if (argument.starts_with("-seed=")) {
      seed = std::stoull(argument.substr(6));
    } else {
      for (const auto& entry : std::filesystem::recursive_directory_iterator(argument)) {
        std::ifstream file(entry.path(), std::ios::binary);
        corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
      }
    }
  }
  std::signal(SIGABRT, on_abort);
  for (const Bytes& bytes : corpus) run(bytes);
  std::mt19937_64 random(seed);
  uint64_t runs = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 20; ++i, ++runs) run(mutated(corpus, random));
  }
  std::printf("%s: %zu inputs of the corpus and %llu mutations of seed %llu, no finding\n",
              arguments[0], corpus.size(), static_cast<unsigned long long>(runs),
              static_cast<unsigned long long>(seed));
  return 0;
}
