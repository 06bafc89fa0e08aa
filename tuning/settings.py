"""From a calibration and a budget to the config of a cache, and the memory it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvswap_torch.config import SwapConfig
from kvswap_torch.errors import BudgetError
from kvswap_torch.projection_file import save_projections
from kvswap_torch.sizing import ModelShape, Request, too_small
from kvswap_torch.tuning.calibration import SUMMARY_DTYPES, Calibration
from kvswap_torch.tuning.choices import TOKENS_SHARES
from kvswap_torch.tuning.costs import GAIN_MIN, hand_out_ranks, uniform_rank
from kvswap_torch.tuning.recall import QUERIES, RANKS, Choice
from kvswap_torch.version import __version__

Need = Callable[[SwapConfig], Mapping[str, int]]
"""Settings -> bytes by use, and their sum as "total"."""

ALIGNMENT_BYTES = 4096  # the coarsest of usual disks: elsewhere a record takes no more


@dataclass(frozen=True)
class Demand:
    """What must fit: sequences, tokens of each, and a limit in bytes."""

    context: int
    batch: int
    budget_bytes: int

    def __post_init__(self) -> None:
        if min(self.context, self.batch, self.budget_bytes) < 1:
            raise ValueError(
                "demand: context, batch and budget_bytes must be positive, got "
                f"{self.context}, {self.batch} and {self.budget_bytes}"
            )


def engine_need(model: Any, demand: Demand, alignment_bytes: int = ALIGNMENT_BYTES) -> Need:
    """`_C.memory_need` for one model and demand.

    Parameters
    ----------
    model
        A transformers model that `kvswap_torch.KVSwapCache` supports.
    alignment_bytes
        Of reads on the disk to be used.
    """
    from kvswap_torch.hf import session
    from kvswap_torch.hf.families import model_parts
    from kvswap_torch.hf.settings import Budget

    parts = model_parts(model)
    budget = Budget(demand.budget_bytes, demand.context, demand.batch)

    def need(config: SwapConfig) -> Mapping[str, int]:
        options = session.session_options(config, parts, ".", budget, calibrated=True)
        return session.memory_need(options, demand.batch, demand.context, alignment_bytes)

    return need


RECORD_WASTE_MAX = 1.5  # bytes read for each byte wanted
# What `TuneOptions.records` may be -> values of `SwapConfig.records` to try.
FORMATS = {"model": ("model",), "fp8": ("fp8",), "both": ("model", "fp8")}


def usable_sizes(
    sizes: Sequence[int], shape: ModelShape, alignment: int, records: str = "model"
) -> list[int]:
    """Group sizes whose records are not mostly padding."""
    token = 2 * shape.width * (1 if records == "fp8" else shape.element_bytes)

    def waste(size: int) -> float:
        return -(-size * token // alignment) * alignment / (size * token)

    return [size for size in sizes if waste(size) <= RECORD_WASTE_MAX] or [max(sizes)]


def sizes_by_format(
    sizes: Sequence[int], shape: ModelShape, alignment: int, searched: str
) -> tuple[tuple[int, ...], frozenset[tuple[str, int]]]:
    """Group sizes that some format can use, rising, and (format, size) of those that it cannot."""
    usable = {each: usable_sizes(sizes, shape, alignment, each) for each in FORMATS[searched]}
    groups = tuple(sorted(set().union(*usable.values())))
    return groups, frozenset((r, g) for r in usable for g in groups if g not in usable[r])


def check_budget(
    model: Any,
    context_max: int,
    batch_max: int,
    budget_bytes: int,
    path: Path,
    choice: Choice,
    sizes: Sequence[int],
    searched: str = "model",
) -> None:
    """Refuses, before anything is measured, a budget that no settings of the tuner's fit in.

    Raises
    ------
    BudgetError
        Names the minimum, what it is made of and what to lower.
    """
    from kvswap_torch.hf.families import model_parts
    from kvswap_torch.hf.session import alignment_bytes

    shape = model_parts(model).shape
    alignment = alignment_bytes(path)
    request = Request(budget_bytes, context_max, batch_max)
    need = engine_need(model, Demand(context_max, batch_max, budget_bytes), alignment)
    tokens = int(choice.group_tokens * choice.groups_max * min(TOKENS_SHARES))
    smallest = [
        SwapConfig(
            group_tokens=size,
            rank=min(RANKS[0], shape.width),
            summary_dtype="int8",
            groups_max=max(1, tokens // size),
            pages_max=max(tokens // size, SwapConfig().select_queries_max),
            score=choice.score,
            sink_tokens=choice.sink_tokens,
            tail_tokens=choice.tail_tokens,
            records=records,
        )
        for records in FORMATS[searched]
        for size in usable_sizes(sizes, shape, alignment, records)
    ]
    least = min(smallest, key=lambda config: need(config)["total"])
    if need(least)["total"] > budget_bytes:
        raise BudgetError(too_small(request, need(least), least))


CONFIG_NAME = "kvswap.json"
PROJECTION_NAME = "projection.safetensors"
PAGES_SHARE = (3, 2)  # pages kept for each group attended, before ranks are handed out
PAGES_MAX_SHARE = 4  # and at most, where memory is left over
PREDICTION_LOSS_MAX = 0.03  # share of a layer's recall; where more is lost it does not look ahead
LOOKUPS_LOST_MAX = 0.005  # share of all layers' look-ups that predictions may lose together


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
    """Layers that lose more to prediction than reading ahead is worth.

    Those that lose much of their own recall; and, of the others, those that lose most look-ups,
    until what all predicted layers lose together is little: on a real model (docs/results.md) three
    of 30 layers with their own queries, of those that retrieve, bring back what prediction costs.
    """
    predicted, true = (calibration.tables[calibration.kind, "model", q] for q in QUERIES)
    alone = {
        layer
        for layer, (guess, known) in enumerate(zip(predicted.worth(), true.worth(), strict=True))
        if max(guess.values()) < (1 - PREDICTION_LOSS_MAX) * max(known.values())
    }
    lost = {
        layer: max(0.0, known - guess)
        for layer, (guess, known) in enumerate(
            zip(predicted.found_by_few(), true.found_by_few(), strict=True)
        )
        if layer not in alone
    }
    spent = 0.0
    for layer in sorted(lost, key=lambda each: (lost[each], each)):
        spent += lost[layer]
        if spent > LOOKUPS_LOST_MAX:
            alone.add(layer)
    return tuple(sorted(alone))


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
