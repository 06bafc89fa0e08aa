#include "tokenizer.h"

#include <cctype>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace {

using nlohmann::json;

constexpr const char* kPieces =
    R"(\n|[0-9]| ?[A-Za-z\x{80}-\x{10FFFF}]+| ?[^ \n0-9A-Za-z\x{80}-\x{10FFFF}]+| +)";

[[noreturn]] void refuse(const std::string& must) {
  throw std::runtime_error("tokenizer.json: " + must +
                           "; this example reads the reference model's kind of tokenizer");
}

/// A printable character for each byte, in UTF-8: what byte-level vocabularies are written in.
/// Printable Latin-1 stands for itself, the others follow from 256 on, in order.
std::vector<std::string> byte_characters() {
  std::vector<std::string> characters(256);
  int others = 0;
  for (int byte = 0; byte < 256; ++byte) {
    const bool is_printable =
        (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    const int point = is_printable ? byte : 256 + others++;
    std::string& character = characters[byte];
    if (point >= 0x80) character += static_cast<char>(0xC0 | point >> 6);
    character += static_cast<char>(point < 0x80 ? point : 0x80 | (point & 0x3F));
  }
  return characters;
}

/// A vocabulary entry's bytes.
std::string unwritten(const std::string& entry, const std::map<std::string, char>& bytes) {
  std::string result;
  for (size_t i = 0; i < entry.size();) {
    const size_t length = (entry[i] & 0x80) ? 2 : 1;
    const auto byte = bytes.find(entry.substr(i, length));
    if (byte == bytes.end()) refuse("its vocabulary must be of bytes, has '" + entry + "'");
    result += byte->second;
    i += length;
  }
  return result;
}

bool is_letter(unsigned char byte) { return byte >= 0x80 || std::isalpha(byte); }
bool is_sign(unsigned char byte) {
  return byte != ' ' && byte != '\n' && !std::isdigit(byte) && !is_letter(byte);
}

/// Where the piece that begins at `begin` ends.
size_t piece_end(const std::string& text, size_t begin) {
  const auto at = [&](size_t i) {
    return static_cast<unsigned char>(i < text.size() ? text[i] : 0);
  };
  const auto run = [&](size_t from, bool (*is)(unsigned char)) {
    while (from < text.size() && is(at(from))) ++from;
    return from;
  };
  if (at(begin) == '\n' || std::isdigit(at(begin))) return begin + 1;
  const size_t first = begin + (at(begin) == ' ' && begin + 1 < text.size());
  if (is_letter(at(first))) return run(first, is_letter);
  if (is_sign(at(first))) return run(first, is_sign);
  return run(begin, [](unsigned char byte) { return byte == ' '; });
}

json read(const std::string& folder) {
  std::ifstream file(folder + "/tokenizer.json");
  if (!file) throw std::runtime_error("--model: must have a tokenizer.json, has none: " + folder);
  return json::parse(file);
}

}  // namespace

Tokenizer::Tokenizer(const std::string& folder) {
  const json description = read(folder);
  const json& model = description.at("model");
  if (model.at("type") != "BPE" || !description.at("normalizer").is_null() ||
      !description.at("post_processor").is_null()) {
    refuse("it must be plain BPE");
  }
  const json& steps = description.at("pre_tokenizer").value("pretokenizers", json::array());
  if (steps.size() != 2 || steps[0].at("type") != "Split" || steps[1].at("type") != "ByteLevel" ||
      steps[0].at("pattern").value("Regex", "") != kPieces || steps[1].at("use_regex") ||
      steps[1].at("add_prefix_space")) {
    refuse("its pre_tokenizer must split by " + std::string(kPieces));
  }
  std::map<std::string, char> bytes;
  const std::vector<std::string> characters = byte_characters();
  for (int byte = 0; byte < 256; ++byte) bytes[characters[byte]] = static_cast<char>(byte);
  for (const json& token : description.at("added_tokens")) {
    added_[token.at("content")] = token.at("id");
  }
  const json& vocabulary = model.at("vocab");
  for (const auto& [entry, id] : vocabulary.items()) {
    if (!added_.contains(entry)) bytes_[id] = unwritten(entry, bytes);
  }
  for (int byte = 0; byte < 256; ++byte) byte_tokens_[byte] = vocabulary.at(characters[byte]);
  for (const json& merge : model.at("merges")) {
    const std::string left = merge.at(0), right = merge.at(1);
    merges_[{vocabulary.at(left), vocabulary.at(right)}] = {static_cast<int64_t>(merges_.size()),
                                                            vocabulary.at(left + right)};
  }
}

std::vector<int64_t> Tokenizer::encode(const std::string& text) const {
  std::vector<int64_t> tokens;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    auto found = added_.begin();
    while (found != added_.end() && text.compare(at, found->first.size(), found->first) != 0) {
      ++found;
    }
    if (found == added_.end()) {
      ++at;
      continue;
    }
    encode_plain(text.substr(begin, at - begin), tokens);
    tokens.push_back(found->second);
    begin = at += found->first.size();
  }
  encode_plain(text.substr(begin), tokens);
  return tokens;
}

void Tokenizer::encode_plain(const std::string& text, std::vector<int64_t>& tokens) const {
  std::unordered_map<std::string, std::vector<int64_t>> known;  // words come again and again
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = piece_end(text, begin);
    const std::string piece = text.substr(begin, end - begin);
    auto [found, is_new] = known.try_emplace(piece);
    if (is_new) found->second = encode_piece(piece);
    tokens.insert(tokens.end(), found->second.begin(), found->second.end());
    begin = end;
  }
}

std::vector<int64_t> Tokenizer::encode_piece(const std::string& piece) const {
  std::vector<int64_t> tokens;
  for (const char byte : piece) tokens.push_back(byte_tokens_[static_cast<unsigned char>(byte)]);
  while (true) {
    const Merge* best = nullptr;
    size_t place = 0;
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      const auto merge = merges_.find({tokens[i], tokens[i + 1]});
      if (merge == merges_.end() || (best && merge->second.rank >= best->rank)) continue;
      best = &merge->second;
      place = i;
    }
    if (!best) return tokens;
    tokens[place] = best->token;
    tokens.erase(tokens.begin() + static_cast<int64_t>(place) + 1);
  }
}

std::string Tokenizer::bytes_of(int64_t token) const {
  const auto found = bytes_.find(token);
  return found == bytes_.end() ? "" : found->second;
}
