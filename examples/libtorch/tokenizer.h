#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

/// Byte-level BPE as the reference model's tokenizer.json describes it.
///
/// Text is cut into pieces of one class of bytes: a newline alone, a digit alone, letters (every
/// byte above 127 is one) or signs with at most one space before, spaces. A piece starts as bytes,
/// of which neighbours are merged as long as a merge is known, the earliest learned first.
class Tokenizer {
 public:
  /// Throws std::runtime_error for a file that is missing or describes another kind of tokenizer.
  explicit Tokenizer(const std::string& folder);

  /// No token is added at either end.
  std::vector<int64_t> encode(const std::string& text) const;
  /// The bytes that a token stands for; none for a special one.
  std::string bytes_of(int64_t token) const;

 private:
  void encode_plain(const std::string& text, std::vector<int64_t>& tokens) const;
  std::vector<int64_t> encode_piece(const std::string& piece) const;

  struct Merge {
    int64_t rank;
    int64_t token;
  };
  int64_t byte_tokens_[256] = {};
  std::map<std::pair<int64_t, int64_t>, Merge> merges_;
  std::unordered_map<int64_t, std::string> bytes_;
  std::map<std::string, int64_t> added_;  // matched in the text as they are
};
