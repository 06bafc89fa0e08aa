#include "kvswap/cache_report.h"

#include <algorithm>
#include <cstdio>

#include "kvswap/memory_size.h"

namespace kvswap {
namespace {

std::string percent(double share) {
  char text[16];
  std::snprintf(text, sizeof(text), "%.1f%%", 100 * share);
  return text;
}

std::string fixed(double value, const char* unit) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f%s", value, unit);
  return text;
}

/// Rows of a name and a value.
class Table {
 public:
  void row(const std::string& name, const std::string& value) {
    text_ += name + std::string(name.size() < 20 ? 20 - name.size() : 1, ' ') + value + "\n";
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

const char* words_of(ProjectionSource source) {
  return source == ProjectionSource::kGiven       ? "file"
         : source == ProjectionSource::kEstimated ? "first prefill"
                                                  : "none needed so far";
}

}  // namespace

std::string report_text(const Report& report) {
  const auto& counters = report.counters;
  const auto bytes = [](double count) { return format_bytes(count); };
  const auto tokens = static_cast<double>(report.positions);
  const auto batch = static_cast<double>(report.batch);
  const auto layers = static_cast<double>(report.shape.layers);
  const double decoded = counters.at("sequences") / layers;
  const double each = 1 / std::max(1.0, decoded);
  const double loaded = counters.at("groups_loaded");
  const auto again = counters.find("groups_read_again");
  const double read = loaded + (again == counters.end() ? 0 : again->second);
  const double attended = counters.at("groups_attended");
  const double full = static_cast<double>(report.shape.kv_bytes(1)) * tokens * batch;
  auto ledger = report.ledger;
  const auto resident = static_cast<double>(ledger.at("total") + report.predictor_bytes);
  const double written = counters.at("bytes_written");
  Table table;
  table.row("tokens", std::to_string(report.positions) + " x " + std::to_string(report.batch) +
                          ", " + std::to_string(static_cast<int64_t>(decoded)) + " decoding steps");
  table.row("KV in a full cache", bytes(full));
  table.row("KV on disk", bytes(counters.at("bytes_on_disk")));
  table.row("KV memory",
            bytes(resident) + " (" + percent(full > 0 ? resident / full : 0) + " of full)");
  if (report.predictor_bytes) ledger["predictor"] = report.predictor_bytes;
  for (const auto& [name, size] : ledger) {
    const bool is_use = name != "total" && name != "peak" && name != "limit";
    if (is_use && size) table.row("  " + name, bytes(static_cast<double>(size)));
  }
  table.row("read", bytes(counters.at("bytes_read")) + ", " +
                        bytes(read * counters.at("record_bytes") * each) + " per token");
  table.row("written",
            bytes(written) + ", " + bytes(written / std::max(1.0, tokens * batch)) + " per token");
  table.row("groups per step", fixed(attended * each / layers, ""));
  table.row("hit rate", attended > 0 ? percent(1 - loaded / attended) : "-");
  table.row("waited / hidden", fixed(counters.at("wait_seconds"), " s") + " / " +
                                   fixed(counters.at("hidden_seconds"), " s"));
  table.row("waited for writes", fixed(counters.at("write_blocked_seconds"), " s"));
  if (const auto missed = counters.find("missed_mass"); missed != counters.end()) {
    table.row("attention missed",
              percent(missed->second) + " ± " + percent(counters.at("missed_mass_error")));
  }
  if (const auto refreshes = counters.find("turns"); refreshes != counters.end()) {
    table.row("turns", std::to_string(static_cast<int64_t>(refreshes->second)) +
                           " of kept tokens, " + bytes(counters.at("turn_bytes_read")) + " read");
    table.row("groups recalled",
              std::to_string(static_cast<int64_t>(counters.at("groups_recalled"))));
  }
  table.row("reader", report.facts.at("reader") + ", " + report.facts.at("io_mode"));
  table.row("projection", words_of(report.projections));
  if (!report.facts.at("fallbacks").empty()) table.row("fell back", report.facts.at("fallbacks"));
  return table.text();
}

}  // namespace kvswap
