"""From a calibration and a budget to the config of a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvswap_torch.config import SwapConfig
from kvswap_torch.projection_file import save_projections
from kvswap_torch.tuning.calibration import SUMMARY_DTYPES, Calibration
from kvswap_torch.tuning.rank_budget import hand_out_ranks, uniform_rank
from kvswap_torch.tuning.recall import QUERIES
from kvswap_torch.tuning.session_need import Demand, Need
from kvswap_torch.version import __version__

CONFIG_NAME = "kvswap.json"
PROJECTION_NAME = "projection.safetensors"
PAGES_SHARE = (3, 2)  # pages kept for each group attended, before ranks are handed out
PAGES_MAX_SHARE = 4  # and at most, where memory is left over
GAIN_MIN = 5e-4  # recall; what a layer gains below it is noise, and pages serve better
PREDICTION_LOSS_MAX = 0.03  # share of a layer's recall; where more is lost it does not look ahead


@dataclass(frozen=True)
class Chosen:
    """A config, and what it is expected to do.

    Parameters
    ----------
    need
        Bytes by use, and their "total".
    recall
        For each layer the recall measured at its rank, with the query it will choose with.
    uniform
        What one rank for all layers would be and reach under the same budget; None where even the
        smallest does not fit.
    """

    config: SwapConfig
    need: dict[str, int]
    recall: tuple[float, ...]
    uniform: tuple[int, float] | None


def choose_settings(
    calibration: Calibration, demand: Demand, need: Need, base: SwapConfig | None = None
) -> Chosen:
    """Summary precision, ranks and pages under a budget.

    Layers whose predicted query finds clearly less than their true one choose with the true one:
    what they read is waited for, but what they need is read. Ranks are handed out for each
    precision of the summary, and the one that holds more attention mass is taken. Memory that no
    rank has a use for keeps more pages.

    Parameters
    ----------
    need
        What settings need for the demand's batch and context.
    base
        Where everything else comes from; its groups must be those of the calibration.

    Raises
    ------
    BudgetError
        When even the smallest ranks do not fit; names the minimum.
    """
    groups = calibration.choice.groups_max
    pages_max = max(groups * PAGES_SHARE[0] // PAGES_SHARE[1], 16)
    start = dataclasses.replace(
        base or SwapConfig(),
        **dataclasses.asdict(calibration.choice),
        pages_max=pages_max,
        projection_kind=calibration.kind,
        look_ahead=True,
        true_query_layers=true_query_layers(calibration),
    )
    candidates = [_with_ranks(start, calibration, dtype, demand, need) for dtype in SUMMARY_DTYPES]
    best = max(candidates, key=lambda chosen: sum(chosen.recall))
    config = _with_spare_pages(best.config, groups * PAGES_MAX_SHARE, demand, need)
    return dataclasses.replace(best, config=config, need=dict(need(config)))


def true_query_layers(calibration: Calibration) -> tuple[int, ...]:
    """Layers that lose more recall to prediction than reading ahead is worth."""
    predicted, true = (
        [max(table.values()) for table in calibration.tables[calibration.kind, "model", q].worth()]
        for q in QUERIES
    )
    return tuple(
        layer
        for layer, (guess, known) in enumerate(zip(predicted, true, strict=True))
        if guess < (1 - PREDICTION_LOSS_MAX) * known
    )


def layer_recall(calibration: Calibration, config: SwapConfig) -> list[dict[int, float]]:
    """For each layer, rank -> what it is worth with the query that `config` has it choose with."""
    predicted, true = (
        calibration.tables[calibration.kind, config.summary_dtype, query].worth()
        for query in QUERIES
    )
    return [
        (true if layer in config.true_query_layers else predicted)[layer]
        for layer in range(len(true))
    ]


def _with_ranks(
    start: SwapConfig, calibration: Calibration, dtype: str, demand: Demand, need: Need
) -> Chosen:
    start = dataclasses.replace(start, summary_dtype=dtype)
    recall = layer_recall(calibration, start)

    def total(ranks: tuple[int, ...]) -> int:
        return need(dataclasses.replace(start, rank=ranks))["total"]

    ranks = hand_out_ranks(recall, total, demand.budget_bytes, GAIN_MIN)
    same = uniform_rank(recall, total, demand.budget_bytes)
    return Chosen(
        dataclasses.replace(start, rank=ranks),
        {},
        tuple(table[rank] for table, rank in zip(recall, ranks, strict=True)),
        None if same is None else (same[0], _mean(recall, same)),
    )


def _mean(recall: Sequence[dict[int, float]], ranks: Sequence[int]) -> float:
    return sum(table[rank] for table, rank in zip(recall, ranks, strict=True)) / len(ranks)


def _with_spare_pages(config: SwapConfig, most: int, demand: Demand, need: Need) -> SwapConfig:
    """As many pages as are left memory for, at most `most`."""
    low, high = config.pages_max, max(most, config.pages_max)
    while low < high:
        middle = (low + high + 1) // 2
        fits = need(dataclasses.replace(config, pages_max=middle))["total"] <= demand.budget_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return dataclasses.replace(config, pages_max=low)


def save_settings(
    folder: str | Path, calibration: Calibration, chosen: Chosen, demand: Demand
) -> SwapConfig:
    """Writes ``kvswap.json`` and ``projection.safetensors``; equal input gives equal bytes.

    The projections keep all their columns, so that another solution may use more of them.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_projections(
        folder / PROJECTION_NAME,
        [
            calibration.pairs[calibration.kind, _query(chosen.config, layer)][layer]
            for layer in range(calibration.shape.layers)
        ],
        kind=calibration.kind,
        model=calibration.identity,
    )
    config = dataclasses.replace(
        chosen.config,
        projection_file=PROJECTION_NAME,
        model=calibration.identity,
        provenance=_provenance(calibration, chosen, demand),
    )
    return config.save(folder / CONFIG_NAME)


def _query(config: SwapConfig, layer: int) -> str:
    return "true" if layer in config.true_query_layers else "predicted"


def _provenance(calibration: Calibration, chosen: Chosen, demand: Demand) -> dict[str, Any]:
    predicted, true = (
        calibration.tables[calibration.kind, chosen.config.summary_dtype, query]
        for query in QUERIES
    )
    layers = [
        {
            "rank": rank,
            "query": _query(chosen.config, layer),
            "recall_predicted_query": round(predicted.recall()[layer][rank], 4),
            "recall_true_query": round(true.recall()[layer][rank], 4),
            "recall_best_groups": round(true.best()[layer], 4),
        }
        for layer, rank in enumerate(chosen.config.ranks(calibration.shape.layers))
    ]
    return {
        "tool": f"kvswap_torch {__version__} calibration",
        "tokens_fitted": calibration.tokens_fitted,
        "tokens_measured": calibration.tokens_measured,
        "steps_measured": calibration.steps_measured,
        "context": demand.context,
        "batch": demand.batch,
        "budget_bytes": demand.budget_bytes,
        "need_bytes": chosen.need["total"],
        "full_cache_bytes": demand.batch * calibration.shape.kv_bytes(demand.context),
        "layers": layers,
        "warnings": list(calibration.warnings),
    }
