#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// What the command line asked for.
struct Options {
  std::string model;
  std::string document;
  std::vector<std::string> questions;
  std::string config;
  std::optional<int64_t> kv_memory_bytes;
  std::string path = ".";
  int64_t max_new_tokens = 200;
  int64_t prefill_chunk = 4096;
  std::string prompt_template = "{document}\n\nQuestion: {question}\nAnswer:";
};

/// The text around a document and its questions.
struct Prompt {
  std::string opening;   // before the document
  std::string question;  // from the document's or an answer's end to the next answer, {question}
};

/// Parses the command line. Ends the program for --help and for what cannot be used.
Options parse_options(int count, char** arguments);

/// Throws std::runtime_error when {document} or {question} is missing, twice there or swapped.
Prompt make_prompt(const std::string& prompt_template);

/// `text` with every `from` replaced.
std::string replaced(std::string text, const std::string& from, const std::string& to);
