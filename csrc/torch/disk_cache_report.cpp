#include <algorithm>
#include <cstdio>

#include "kvswap/memory_size.h"
#include "torch/disk_cache.h"
#include "torch/session.h"

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

}  // namespace

std::string DiskCache::report() const {
  const auto counters = session_->counters();
  const auto facts = session_->facts();
  auto ledger = session_->ledger();
  const auto bytes = [](double count) { return format_bytes(count); };
  const double tokens = static_cast<double>(session_->columns(0));
  const auto batch = static_cast<double>(session_->batch());
  const double decoded = counters.at("sequences") / static_cast<double>(options_.shape.layers);
  const double each = 1 / std::max(1.0, decoded);
  const double loaded = counters.at("groups_loaded");
  const double attended = counters.at("groups_attended");
  const double full = static_cast<double>(options_.shape.kv_bytes(1)) * tokens * batch;
  const auto resident = static_cast<double>(ledger.at("total") + predictor_bytes_);
  const double written = counters.at("bytes_written");
  Table table;
  table.row("tokens", std::to_string(session_->columns(0)) + " x " +
                          std::to_string(session_->batch()) + ", " +
                          std::to_string(static_cast<int64_t>(decoded)) + " decoding steps");
  table.row("KV in a full cache", bytes(full));
  table.row("KV on disk", bytes(counters.at("bytes_on_disk")));
  table.row("KV memory",
            bytes(resident) + " (" + percent(full > 0 ? resident / full : 0) + " of full)");
  if (predictor_bytes_) ledger["predictor"] = predictor_bytes_;
  for (const auto& [name, size] : ledger) {
    const bool is_use = name != "total" && name != "peak" && name != "limit";
    if (is_use && size) table.row("  " + name, bytes(static_cast<double>(size)));
  }
  table.row("read", bytes(counters.at("bytes_read")) + ", " +
                        bytes(loaded * counters.at("record_bytes") * each) + " per token");
  table.row("written",
            bytes(written) + ", " + bytes(written / std::max(1.0, tokens * batch)) + " per token");
  table.row("groups per step",
            fixed(attended * each / static_cast<double>(options_.shape.layers), ""));
  table.row("hit rate", attended > 0 ? percent(1 - loaded / attended) : "-");
  table.row("waited / hidden", fixed(counters.at("wait_seconds"), " s") + " / " +
                                   fixed(counters.at("hidden_seconds"), " s"));
  table.row("waited for writes", fixed(counters.at("write_blocked_seconds"), " s"));
  if (const auto missed = counters.find("missed_mass"); missed != counters.end()) {
    table.row("attention missed",
              percent(missed->second) + " ± " + percent(counters.at("missed_mass_error")));
  }
  table.row("reader", facts.at("reader") + ", " + facts.at("io_mode"));
  const bool any =
      std::find(is_estimated_.begin(), is_estimated_.end(), true) != is_estimated_.end();
  table.row("projection", is_calibrated_ ? "file" : any ? "first prefill" : "none needed so far");
  if (!facts.at("fallbacks").empty()) table.row("fell back", facts.at("fallbacks"));
  return table.text();
}

}  // namespace kvswap
