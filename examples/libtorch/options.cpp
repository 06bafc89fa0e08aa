#include "options.h"

#include <kvswap/memory_size.h>

#include <CLI/CLI.hpp>
#include <stdexcept>

namespace {

constexpr const char* kAbout =
    "Answers questions about a long document with a Qwen3 model whose KV cache lives on disk.\n"
    "The document is read once; then each question is asked in turn and sees those before it.";

constexpr const char* kLessons = R"(
Start here: one document, one question, defaults for everything else.
  kvswap_generate --model DIR --document book.txt --question "Who tells it?"

Calibrated settings: choices are better, and reads hide behind computing.
  ... --config DIR/kvswap.json

Less memory: give a budget; the rest follows from it, or you are told the minimum.
  ... --kv-memory 64MiB --path /fast/disk

Several turns: repeat --question.
  ... --question "Who tells it?" --question "Where does she live?"

The answers are those of `python -m kvswap_torch generate` with the same options. They go to
standard output, progress and statistics to standard error.)";

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace

Options parse_options(int count, char** arguments) {
  Options options;
  std::string kv_memory;
  CLI::App app(kAbout);
  app.footer(kLessons);
  app.add_option("--model", options.model, "Folder of a Qwen3 model: weights and tokenizer.")
      ->required()
      ->check(CLI::ExistingDirectory);
  app.add_option("--document", options.document, "Text file, UTF-8.")
      ->required()
      ->check(CLI::ExistingFile);
  app.add_option("--question", options.questions, "A question; repeat for several turns.")
      ->required()
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--config", options.config, "What the tuner wrote, or SwapConfig.save().")
      ->check(CLI::ExistingFile);
  app.add_option("--kv-memory", kv_memory, "Most memory the KV cache may take, as 512MiB.");
  app.add_option("--path", options.path, "Folder on the disk that holds the KV cache.")
      ->check(CLI::ExistingDirectory)
      ->capture_default_str();
  app.add_option("--max-new-tokens", options.max_new_tokens, "Longest answer, in tokens.")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  app.add_option("--prefill-chunk", options.prefill_chunk, "Tokens of the document per pass.")
      ->check(CLI::Range(int64_t{64}, int64_t{1} << 20))
      ->capture_default_str();
  app.add_option("--prompt-template", options.prompt_template,
                 "A text with {document} and {question}; \\n is a new line.");
  try {
    app.parse(count, arguments);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  if (!kv_memory.empty()) options.kv_memory_bytes = kvswap::parse_bytes(kv_memory, "--kv-memory");
  return options;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

Prompt make_prompt(const std::string& prompt_template) {
  // A shell gives \n as two characters.
  const std::string text = replaced(replaced(prompt_template, "\\n", "\n"), "\\t", "\t");
  const size_t document = text.find("{document}");
  const size_t question = text.find("{question}");
  if (count_of(text, "{document}") != 1 || count_of(text, "{question}") != 1 ||
      question < document) {
    throw std::runtime_error(
        "--prompt-template: must have {document} once and then {question} once, got '" +
        prompt_template + "'");
  }
  return {text.substr(0, document), text.substr(document + std::string("{document}").size())};
}
