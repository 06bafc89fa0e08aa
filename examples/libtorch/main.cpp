// Answers questions about a long document: Qwen3 on LibTorch, its KV cache on disk, no Python.

#include <kvswap/errors.h>
#include <kvswap/torch/tensor_cache.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "options.h"
#include "qwen3.h"
#include "tokenizer.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream bytes;
  bytes << file.rdbuf();
  if (!file) throw std::runtime_error("--document: must be readable, is not: " + path);
  try {
    (void)nlohmann::json(bytes.str()).dump();  // checks the encoding
  } catch (const nlohmann::json::exception&) {
    throw std::runtime_error("--document: must be readable UTF-8 text, is not: " + path);
  }
  return replaced(replaced(bytes.str(), "\r\n", "\n"), "\r", "\n");
}

/// A model, its cache and the tokens both have seen so far.
class Conversation {
 public:
  Conversation(const Qwen3& model, const Tokenizer& tokenizer, kvswap::TensorCache& cache)
      : model_(model), tokenizer_(tokenizer), cache_(cache) {}

  /// Prefills the document.
  void read(const std::vector<int64_t>& document, int64_t chunk) {
    const auto began = Clock::now();
    const auto total = static_cast<int64_t>(document.size());
    for (int64_t begin = 0; begin < total; begin += chunk) {
      const int64_t end = std::min(begin + chunk, total);
      cache_.begin_pass(kvswap::Pass::kPrefill);
      model_.forward({document.begin() + begin, document.begin() + end}, cache_);
      std::fprintf(stderr, "\rreading the document: %ld of %ld tokens, %.0f tokens/s",
                   static_cast<long>(end), static_cast<long>(total),
                   static_cast<double>(end) / seconds_since(began));
    }
    std::fputc('\n', stderr);
    tokens_ = document;
  }

  /// Greedy; writes the answer as it comes.
  void ask(const std::vector<int64_t>& question, int64_t max_new_tokens) {
    tokens_.insert(tokens_.end(), question.begin(), question.end());
    const int64_t most = cache_.cache().options().settings.select_queries_max;
    int64_t count = 0;
    for (bool is_last = false; !is_last; ++count) {
      // What the cache has not seen: the question, then one token at a time.
      const std::vector<int64_t> unread(tokens_.begin() + cache_.cache().held().positions,
                                        tokens_.end());
      // As Python does, a question that is short enough for it is answered over what it selects.
      const bool is_short = static_cast<int64_t>(unread.size()) <= most;
      cache_.begin_pass(is_short ? kvswap::Pass::kDecode : kvswap::Pass::kPrefill);
      const at::Tensor logits = model_.forward(unread, cache_);
      const auto token = logits.argmax().item<int64_t>();
      std::cout << tokenizer_.bytes_of(token) << std::flush;
      if (count == 0) began_ = Clock::now();
      const bool is_end = model_.end_tokens().contains(token);
      // The end token does not enter the cache: the next turn's text brings its own.
      if (!is_end) tokens_.push_back(token);
      is_last = is_end || count + 1 == max_new_tokens;
    }
    if (count > 1) {
      seconds_ += seconds_since(began_);
      timed_ += count - 1;
    }
  }

  /// Answers' tokens per second, each first one left out; 0: none was timed.
  double speed() const { return seconds_ > 0 ? static_cast<double>(timed_) / seconds_ : 0; }

 private:
  const Qwen3& model_;
  const Tokenizer& tokenizer_;
  kvswap::TensorCache& cache_;
  std::vector<int64_t> tokens_;
  Clock::time_point began_;
  double seconds_ = 0;
  int64_t timed_ = 0;
};

void run(const Options& options) {
  const Prompt prompt = make_prompt(options.prompt_template);
  const Tokenizer tokenizer(options.model);
  const std::vector<int64_t> document =
      tokenizer.encode(prompt.opening + read_text(options.document));
  if (document.empty()) {
    throw std::runtime_error("--document: must not be empty, got " + options.document);
  }
  std::vector<std::vector<int64_t>> questions;
  auto context = static_cast<int64_t>(document.size());
  for (const std::string& question : options.questions) {
    questions.push_back(tokenizer.encode(replaced(prompt.question, "{question}", question)));
    context += static_cast<int64_t>(questions.back().size()) + options.max_new_tokens;
  }
  const Qwen3 model(options.model);
  kvswap::OpenArgs args;
  args.shape = model.shape();
  args.model_type = model.type();
  args.directory = options.path;
  args.config_path = options.config;
  args.budget = {options.kv_memory_bytes, context, /*max_batch=*/1};
  kvswap::TensorCache cache(args);
  Conversation conversation(model, tokenizer, cache);
  conversation.read(document, options.prefill_chunk);
  for (size_t i = 0; i < questions.size(); ++i) {
    std::cout << "\n> " << options.questions[i] << "\n";
    conversation.ask(questions[i], options.max_new_tokens);
    std::cout << "\n" << std::flush;
  }
  std::fprintf(stderr, "\nanswers             %.1f tokens/s\n%s", conversation.speed(),
               kvswap::report_text(cache.cache().report()).c_str());
}

}  // namespace

int main(int count, char** arguments) {
  try {
    run(parse_options(count, arguments));
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
  }
  return 1;
}
