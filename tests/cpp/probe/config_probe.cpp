// Answers tests/python/test_config_cpp.py: one JSON request a line, one JSON answer a line. The
// same requests go through Python, and the answers are compared.

#include <iostream>
#include <numeric>

#include "engine/settings_check.h"
#include "kvswap/cache.h"
#include "kvswap/json.h"
#include "kvswap/memory_size.h"
#include "kvswap/settings_rules.h"
#include "kvswap/swap_config.h"

namespace kvswap {
namespace {

Json json(const SwapConfig& config) {
  Json table = Json::array();
  for (const Solution& row : config.table) {
    table.push_back({{"batch", row.batch},
                     {"context", row.context},
                     {"settings", Json::parse(settings_json(row.settings))}});
  }
  Json model;
  if (config.model) {
    visit_identity([&](const char* name, auto member) {
      const auto& value = (*config.model).*member;
      model[name] = value ? Json(*value) : Json();
    });
  }
  return {{"settings", Json::parse(settings_json(config.settings))},
          {"table", table},
          {"model", model}};
}

std::optional<int64_t> perhaps(const Json& request, const char* name) {
  const Json* value = find_field(request, name);
  return value && value->is_number() ? std::optional(value->get<int64_t>()) : std::nullopt;
}

ModelShape shape_of(const Json& request) {
  const std::string dtype = request.at("dtype");
  return {request.at("layers"), request.at("heads"), request.at("kv_heads"), request.at("head_dim"),
          dtype == "float32"    ? ElementType::kFloat32
          : dtype == "bfloat16" ? ElementType::kBFloat16
                                : ElementType::kFloat16};
}

Json prepared(const Json& request) {
  OpenArgs args;
  args.shape = shape_of(request);
  args.model_type = request.at("model_type");
  args.directory = request.at("directory");
  args.config_path = request.at("path");
  args.budget = {perhaps(request, "kv_memory_bytes"), perhaps(request, "max_context"),
                 perhaps(request, "max_batch")};
  if (const auto batch = perhaps(request, "first_batch")) {
    args.first = FirstPass{*batch, request.at("first_tokens")};
  }
  args.predictor_bytes = perhaps(request, "reserved_bytes").value_or(0);
  const Opening opening = prepare(args);
  double sum = 0;  // of all the projections' numbers
  for (const Projection& pair : opening.projections) {
    sum = std::accumulate(pair.keys.begin(), pair.keys.end(), sum);
    sum = std::accumulate(pair.queries.begin(), pair.queries.end(), sum);
  }
  return {{"settings", Json::parse(settings_json(opening.options.settings))},
          {"ranks", opening.options.ranks},
          {"projections", opening.projections.size()},
          {"sum", sum}};
}

Json answer(const Json& request) {
  const std::string wanted = request.at("do");
  if (wanted == "load") return json(SwapConfig::load(request.at("path")));
  if (wanted == "nearest") {
    return Json::parse(
        settings_json(SwapConfig::load(request.at("path"))
                          .for_batch_and_context(request.at("batch"), request.at("context"))));
  }
  if (wanted == "prepare") return prepared(request);
  if (wanted == "parse_bytes") return parse_bytes(request.at("size"), "size");
  if (wanted == "format_bytes") return format_bytes(request.at("count").get<double>());
  throw std::invalid_argument("config_probe: no such request, " + wanted);
}

Json outcome(const std::string& line) {
  const auto refused = [](const char* kind, const std::exception& error) -> Json {
    return {{"refused", kind}, {"error", error.what()}};
  };
  try {
    return {{"ok", answer(Json::parse(line))}};
  } catch (const SessionError& error) {
    return refused("budget", error);
  } catch (const ConfigError& error) {
    return refused("config", error);
  } catch (const std::exception& error) {
    return refused("other", error);
  }
}

}  // namespace
}  // namespace kvswap

int main() {
  constexpr auto kReplace = kvswap::Json::error_handler_t::replace;  // what came may be no UTF-8
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << kvswap::outcome(line).dump(-1, ' ', true, kReplace) << "\n";
  }
}
