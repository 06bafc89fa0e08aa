// The registry: every choice of SummaryEncoder has its line here.

#include <algorithm>
#include <array>
#include <numeric>

#include "kernels/low_rank_score.h"
#include "methods/summary/device_encoder.h"
#include "methods/summary/low_rank_encoder.h"
#include "methods/summary/mean_encoder.h"
#include "methods/summary/min_max_encoder.h"
#include "methods/summary/null_encoder.h"
#include "methods/summary/summary_encoder.h"
#include "methods/summary/user_scored_encoder.h"

namespace kvswap {
namespace {

constexpr std::array kKinds = {
    SummaryKind{.name = "low_rank",
                .source = "KVSwap 3.2, 3.3",
                .takes_projections = true,
                .scores_by_mass = true,
                .needs_all_heads = false,
                .is_given = false,
                .is_of_clusters = false,
                .on_device = &low_rank_on_device,
                .shape = LowRankEncoder::shape_of,
                .make = LowRankEncoder::make},
    SummaryKind{.name = "box",
                .source = "Quest 3.2",
                .takes_projections = false,
                .scores_by_mass = false,
                .needs_all_heads = true,
                .is_given = false,
                .is_of_clusters = false,
                .on_device = &box_on_device,
                .shape = MinMaxEncoder::shape_of,
                .make = MinMaxEncoder::make},
    SummaryKind{.name = "mean",
                .source = "ShadowKV 4.1",
                .takes_projections = false,
                .scores_by_mass = false,
                .needs_all_heads = false,
                .is_given = false,
                .is_of_clusters = false,
                .on_device = &mean_on_device,
                .shape = MeanEncoder::shape_of,
                .make = MeanEncoder::make},
    SummaryKind{.name = "centroid",
                .source = "DynaKV 4.1",
                .takes_projections = false,
                .scores_by_mass = true,
                .needs_all_heads = false,
                .is_given = false,
                .is_of_clusters = true,
                .on_device = nullptr,
                .shape = NullEncoder::shape_of,
                .make = NullEncoder::make},
    SummaryKind{.name = "given",
                .source = "",
                .takes_projections = false,
                .scores_by_mass = false,
                .needs_all_heads = false,
                .is_given = true,
                .is_of_clusters = false,
                .on_device = nullptr,
                .shape = UserScoredEncoder::shape_of,
                .make = UserScoredEncoder::make},
    SummaryKind{.name = "none",
                .source = "FlexGen",
                .takes_projections = false,
                .scores_by_mass = false,
                .needs_all_heads = false,
                .is_given = false,
                .is_of_clusters = false,
                .on_device = nullptr,
                .shape = NullEncoder::shape_of,
                .make = NullEncoder::make},
};

constexpr int64_t kChunkTokensMax = 1024;
constexpr int64_t kChunkRowsOfGroups = 256;

}  // namespace

std::span<const SummaryKind> SummaryKind::all() { return kKinds; }

const SummaryKind* SummaryKind::find(const std::string& name) {
  const auto found = std::find_if(kKinds.begin(), kKinds.end(),
                                  [&](const SummaryKind& kind) { return name == kind.name; });
  return found == kKinds.end() ? nullptr : &*found;
}

std::string SummaryKind::names() {
  std::string names;
  for (const SummaryKind& kind : kKinds)
    names += (names.empty() ? "" : ", ") + std::string(kind.name);
  return names;
}

bool has_device_kernels(const MethodOptions& options) {
  const SummaryKind& kind = *SummaryKind::find(options.rows);
  if (kind.on_device == nullptr || options.score == Score::kMax || options.score_columns > 0 ||
      options.summary_dtype == DType::kInt4) {
    return false;
  }
  const auto most = std::max_element(options.ranks.begin(), options.ranks.end());
  const int64_t rank = most == options.ranks.end() ? 0 : *most;
  const int64_t widest = kind.takes_projections ? rank : kind.shape(options, 0).width;
  return widest <= cuda::kSummaryRankMax;
}

Status check_method(const MethodOptions& options) {
  const SummaryKind* kind = SummaryKind::find(options.rows);
  if (kind == nullptr) {
    return Status::invalid("session: summary.kind must be one of " + SummaryKind::names() +
                           ", got '" + options.rows + "'");
  }
  if (!kind->takes_projections && !options.ranks.empty()) {
    return Status::invalid("session: summary.rank must be left out where summary.kind has none (" +
                           options.rows + "), got " + std::to_string(options.ranks.size()));
  }
  const bool is_by_mass = options.score == Score::kMass || options.score == Score::kMaxMass;
  if (!kind->scores_by_mass && is_by_mass) {
    return Status::invalid(
        "session: selection.score must be logit_sum or logit_max where summary.kind has no "
        "products of single tokens (" +
        options.rows + "), got mass_sum or mass_max");
  }
  if (options.score_columns > 0 && (!kind->takes_projections || is_by_mass)) {
    return Status::invalid(
        "session: summary.coarse_rank must be left out but with low_rank and selection.score "
        "logit_sum or logit_max, got " +
        std::to_string(options.score_columns));
  }
  const bool is_int4 = options.summary_dtype == DType::kInt4;
  if (!kind->takes_projections && is_int4) {
    return Status::invalid(
        "session: summary.dtype must be auto or int8 where summary.kind is not low_rank (" +
        options.rows + "), got int4");
  }
  if (options.score_columns > 0 && is_int4) {
    return Status::invalid(
        "session: summary.coarse_rank must be left out where summary.dtype is int4, which has "
        "not been built for two stages, got " +
        std::to_string(options.score_columns));
  }
  return Status::ok();
}

int64_t chunk_rows(int64_t group_tokens, int64_t tokens_per_row) {
  if (tokens_per_row > 1) return kChunkRowsOfGroups;
  const int64_t unit = std::lcm(kSummaryBlock, group_tokens);
  return std::max(unit, kChunkTokensMax / unit * unit);
}

void SummaryEncoder::ask_each_head(int64_t, const QueryView&, int64_t, float, float*) const {
  KVSWAP_ASSERT(false);
}

Status SummaryEncoder::give(int64_t layer, const UserScores&) {
  return Status::invalid("give_scores: layer " + std::to_string(layer) +
                         " must have summary.kind user to take scores, and scores its own rows");
}

void SummaryEncoder::take(int64_t, std::span<float>) { KVSWAP_ASSERT(false); }

Status SummaryEncoder::set_projection(int64_t layer, int64_t, const float*, const float*) {
  return Status::invalid(
      "set_projection: layer " + std::to_string(layer) +
      " must have a summary.kind that takes projections (low_rank), and has another");
}

}  // namespace kvswap
