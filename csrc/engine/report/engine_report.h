#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "engine/engine.h"

namespace kvswap {

// What every session reports about itself, by name.

/// Tokens by a layer of a sequence (see Engine), on average; dropped: on disk or gone, never
/// attended.
enum class RetainedAs { kAny, kFloat8 };
double tokens_retained(const Engine& engine, RetainedAs precision = RetainedAs::kAny);
double tokens_dropped(const Engine& engine);

/// Where layers choose clusters, by a layer of a sequence on average: `clusters`,
/// `tokens_a_cluster` and `pages_a_cluster`, `tokens_waiting`; in all: `cluster_splits`, those
/// `_refused` for lack of numbers and `_forced` by what waited, `cluster_records_sealed`, and those
/// `_read` for tokens that waited; `bytes_a_read`, of whatever is read.
///
/// Where layers look at what they did not select, also what they found: `audits` (looks), and once
/// there is one `missed_mass`, `missed_mass_error` and `missed_mass_<layer>`; with missed_mass_max
/// `groups_now_<layer>` and `missed_mass_excess`, see AdaptiveTopK.
std::map<std::string, double> engine_counters(const Engine& engine);
std::map<std::string, std::string> engine_facts(const Engine& engine);
std::map<std::string, int64_t> engine_ledger(const Engine& engine);
/// The timeline as chrome_trace() writes it; kInvalid where none is recorded.
Status engine_timeline(const Engine& engine, std::string& trace);

}  // namespace kvswap
