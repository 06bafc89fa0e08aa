// Answers tests/python/test_config_cpp.py: one JSON request a line, one JSON answer a line. The
// same requests go through Python, and the answers are compared.

#include <cmath>
#include <iostream>
#include <numeric>

#include "kvswap/core_session.h"
#include "kvswap/json.h"
#include "kvswap/memory_size.h"
#include "kvswap/settings_rules.h"
#include "kvswap/swap_config.h"

namespace kvswap {
namespace {

std::string quoted(const std::string& text) {
  std::string shown = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') shown += '\\';
    if (static_cast<unsigned char>(letter) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", letter);
      shown += escape;
    } else {
      shown += letter;
    }
  }
  return shown + '"';
}

std::string json(int64_t value) { return std::to_string(value); }
std::string json(bool value) { return value ? "true" : "false"; }
std::string json(const std::string& value) { return quoted(value); }
std::string json(const std::vector<int64_t>& value) { return python_repr(value); }
template <typename T>
std::string json(const std::optional<T>& value) {
  return value ? json(*value) : "null";
}
std::string json(const Rank& value) {
  return std::visit([](const auto& rank) { return json(rank); }, value);
}

std::string json(const Settings& settings) {
  std::string text;
  visit_settings([&](const char* name, auto member, const auto&) {
    text += (text.empty() ? "" : ", ") + quoted(name) + ": " + json(settings.*member);
  });
  return "{" + text + "}";
}

std::string json(const SwapConfig& config) {
  std::string table;
  for (const Solution& row : config.table) {
    table += (table.empty() ? "" : ", ") + std::string("{\"batch\": ") + json(row.batch) +
             ", \"context\": " + json(row.context) + ", \"settings\": " + json(row.settings) + "}";
  }
  std::string model;
  visit_identity([&](const char* name, auto member) {
    const ModelIdentity identity = config.model.value_or(ModelIdentity{});
    model += (model.empty() ? "" : ", ") + quoted(name) + ": " + json(identity.*member);
  });
  return "{\"settings\": " + json(config.settings) + ", \"table\": [" + table +
         "], \"model\": " + (config.model ? "{" + model + "}" : "null") + "}";
}

int64_t integer(const JsonValue& request, const char* name, int64_t otherwise = 0) {
  const JsonValue* value = request.find(name);
  return value ? value->integer : otherwise;
}

std::optional<int64_t> perhaps(const JsonValue& request, const char* name) {
  const JsonValue* value = request.find(name);
  if (!value || value->kind == JsonValue::Kind::kNull) return std::nullopt;
  return value->integer;
}

std::string word(const JsonValue& request, const char* name) {
  const JsonValue* value = request.find(name);
  return value ? value->text : "";
}

ModelShape shape_of(const JsonValue& request) {
  const std::string dtype = word(request, "dtype");
  return {integer(request, "layers"), integer(request, "heads"), integer(request, "kv_heads"),
          integer(request, "head_dim"),
          dtype == "float32"    ? ElementType::kFloat32
          : dtype == "bfloat16" ? ElementType::kBFloat16
                                : ElementType::kFloat16};
}

std::string prepared(const JsonValue& request) {
  OpenArgs args;
  args.shape = shape_of(request);
  args.model_type = word(request, "model_type");
  args.directory = word(request, "directory");
  args.config_path = word(request, "path");
  args.budget = {perhaps(request, "kv_memory_bytes"), perhaps(request, "max_context"),
                 perhaps(request, "max_batch")};
  if (const auto batch = perhaps(request, "first_batch")) {
    args.first = FirstPass{*batch, integer(request, "first_tokens")};
  }
  args.predictor_bytes = integer(request, "reserved_bytes");
  const Opening opening = prepare(args);
  double sum = 0;  // of all the projections' numbers
  for (const Projection& pair : opening.projections) {
    sum = std::accumulate(pair.keys.begin(), pair.keys.end(), sum);
    sum = std::accumulate(pair.queries.begin(), pair.queries.end(), sum);
  }
  return "{\"settings\": " + json(opening.options.settings) +
         ", \"ranks\": " + json(opening.options.ranks) +
         ", \"projections\": " + json(static_cast<int64_t>(opening.projections.size())) +
         ", \"sum\": " + std::to_string(sum) + "}";
}

std::string answer(const JsonValue& request) {
  const std::string wanted = word(request, "do");
  if (wanted == "load") return json(SwapConfig::load(word(request, "path")));
  if (wanted == "nearest") {
    return json(SwapConfig::load(word(request, "path"))
                    .for_batch_and_context(integer(request, "batch"), integer(request, "context")));
  }
  if (wanted == "prepare") return prepared(request);
  if (wanted == "parse_bytes") return json(parse_bytes(word(request, "size"), "size"));
  if (wanted == "format_bytes") {
    return quoted(format_bytes(static_cast<double>(integer(request, "count"))));
  }
  throw std::invalid_argument("config_probe: no such request, " + wanted);
}

void run() {
  for (std::string line; std::getline(std::cin, line);) {
    try {
      const std::string told = answer(parse_json(line));
      std::cout << "{\"ok\": " << told << "}\n";
    } catch (const SessionError& error) {
      std::cout << "{\"refused\": \"budget\", \"error\": " << quoted(error.what()) << "}\n";
    } catch (const ConfigError& error) {
      std::cout << "{\"refused\": \"config\", \"error\": " << quoted(error.what()) << "}\n";
    } catch (const std::exception& error) {
      std::cout << "{\"refused\": \"other\", \"error\": " << quoted(error.what()) << "}\n";
    }
  }
}

}  // namespace
}  // namespace kvswap

int main() { kvswap::run(); }
