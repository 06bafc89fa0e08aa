"""From a memory budget to settings that fit it.

What a session's memory is made of is written down once, in C++ (`kvswap::memory_need`); here is
only the search for settings whose need stays within a budget.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvswap_torch.config import SwapConfig
from kvswap_torch.errors import BudgetError, ConfigError
from kvswap_torch.memory_size import format_bytes

RANK_MIN = 8  # below it choices are hardly better than chance
GROUPS_MIN = 8

Need = Callable[[SwapConfig], Mapping[str, int]]
"""Settings -> bytes by use, and their sum as "total"; never less for more rank, groups or pages."""


@dataclass(frozen=True)
class ModelShape:
    """The part of a model that is kept on disk.

    Parameters
    ----------
    layers
        Layers on disk: the full-attention ones.
    heads, kv_heads, head_dim
        Attention heads, key-value heads, and their width.
    element_bytes
        Bytes of one element of K or V.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int

    @property
    def width(self) -> int:
        """Elements of one token's K in one layer."""
        return self.kv_heads * self.head_dim

    def row_width(self, config: SwapConfig) -> int:
        """Elements of a token's K that make one row of a summary: the most columns it can have."""
        return config.row_heads(self.kv_heads) * self.head_dim

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of K and V of `tokens` tokens in all layers, uncompressed."""
        return 2 * self.layers * self.width * self.element_bytes * tokens


def effective_ranks(config: SwapConfig, shape: ModelShape, calibrated: bool) -> tuple[int, ...]:
    """The rank of each layer on disk: the config's, twice that when it is not calibrated.

    Never more than the keys are wide.
    None where rows have no rank.
    """
    if not config.takes_projections:
        return ()
    factor = 2 if config.doubles_estimates and not calibrated else 1
    return tuple(min(shape.row_width(config), factor * rank) for rank in config.ranks(shape.layers))


@dataclass(frozen=True)
class Request:
    """What must fit: a budget in bytes, tokens per sequence, and sequences."""

    kv_memory_bytes: int
    context: int
    batch: int

    def __post_init__(self) -> None:
        if min(self.kv_memory_bytes, self.context, self.batch) < 1:
            raise ConfigError(
                "kv_memory_bytes, max_context and max_batch: must be positive, got "
                f"{self.kv_memory_bytes}, {self.context} and {self.batch}"
            )


def fit_budget(request: Request, shape: ModelShape, config: SwapConfig, need: Need) -> SwapConfig:
    """The settings to use under a budget: `config` with rank, groups and pages that fit.

    From the smallest usable settings upwards: first rank and groups together up to the config's
    own, then pages up to its `pages_max`. A rank for each layer keeps its proportions.

    Parameters
    ----------
    need
        What settings need for the request's batch and context.

    Raises
    ------
    BudgetError
        When even the smallest settings do not fit; names the minimum and what to lower.
    """

    def fits(candidate: SwapConfig) -> bool:
        return need(candidate)["total"] <= request.kv_memory_bytes

    def at(step: int) -> SwapConfig:
        return _in_least_memory(_between(config, shape, step), config.pages_max, need)

    if not fits(at(0)):
        raise BudgetError(too_small(request, need(at(0)), at(0)))
    step = _largest(_STEPS, lambda n: fits(at(n)))
    return _with_spare_pages(at(step), config.pages_max, fits)


# What a choice costs: nats of divergence from the full cache's next token, on a model of 135M
# parameters with keys of 192 elements, at 3,900 tokens, int8 rows, scored by mass, projections from
# the prompt; docs/choosing.md has what was measured. First by columns of the summary, then by
# tokens attended; the two nearly add.
MISSED_BY_COLUMNS = (
    (8, 0.45),
    (12, 0.40),
    (16, 0.32),
    (24, 0.10),
    (32, 0.03),
    (48, 0.01),
    (64, 0.00),
)
MISSED_BY_TOKENS = ((32, 0.21), (64, 0.15), (128, 0.085), (256, 0.035), (400, 0.01))


def spend_budget(request: Request, shape: ModelShape, config: SwapConfig, need: Need) -> SwapConfig:
    """The settings that make the most of a budget, where nobody has calibrated or asked for any.

    Where the whole context fits it is kept, and attention is exact. Otherwise columns and groups
    are chosen together, by what they are worth: of every number of columns with the most groups
    that then fit, up to `config`'s, the pair that misses least. Columns come first: 8 of them find
    a tenth of what is asked for with 100 groups, and 32 find nine tenths with 8. What is left over
    keeps more pages.

    Parameters
    ----------
    config
        Everything else; rank is half the columns, since it is doubled without a calibration.

    Raises
    ------
    BudgetError
        As `fit_budget`.
    """

    def fits(candidate: SwapConfig) -> bool:
        return need(candidate)["total"] <= request.kv_memory_bytes

    def at(columns: int, groups: int) -> SwapConfig:
        least = dataclasses.replace(
            config,
            rank=max(1, min(columns, shape.row_width(config)) // 2),
            groups_max=groups,
            pages_max=max(groups, config.select_queries_max),
        )
        return _in_least_memory(least, config.pages_max, need)

    smallest = at(MISSED_BY_COLUMNS[0][0], GROUPS_MIN)
    if not fits(smallest):
        raise BudgetError(too_small(request, need(smallest), smallest))
    whole = -(-request.context // config.group_tokens)
    best, least = smallest, math.inf
    for columns, missed in MISSED_BY_COLUMNS:
        is_exact = fits(at(columns, whole))
        low = whole if is_exact else GROUPS_MIN
        if not fits(at(columns, low)):
            break
        spare = max(0, config.groups_max - low)
        groups = low + _largest(spare, lambda n, c=columns, g=low: fits(at(c, g + n)))
        # What is exact misses nothing, and more columns do no harm to it.
        missed = -columns if is_exact else missed + missed_by_tokens(groups * config.group_tokens)
        if missed < least:
            best, least = at(columns, groups), missed
    return _with_spare_pages(best, config.pages_max, fits)


def missed_by_tokens(tokens: int) -> float:
    """Between the measured numbers a straight line, beyond them the nearest."""
    low = MISSED_BY_TOKENS[0]
    for high in MISSED_BY_TOKENS:
        if tokens <= high[0]:
            span = max(1, high[0] - low[0])
            return low[1] + (high[1] - low[1]) * max(0, tokens - low[0]) / span
        low = high
    return low[1]


_STEPS = 64


def _between(config: SwapConfig, shape: ModelShape, step: int) -> SwapConfig:
    """`step` / 64 of the way from the smallest usable settings to `config`'s; no spare pages."""

    def part(low: int, high: int) -> int:
        return high if high <= low else low + (high - low) * step // _STEPS

    rank = config.rank
    if config.takes_projections:
        width = shape.row_width(config)
        rank_min = min(RANK_MIN, width)
        ranks = [part(rank_min, min(rank, width)) for rank in config.ranks(shape.layers)]
        rank = ranks[0] if isinstance(config.rank, int) else tuple(ranks)
    groups = part(GROUPS_MIN, config.groups_max)
    return dataclasses.replace(
        config,
        rank=rank,
        groups_max=groups,
        # Each query of a short chunk must find a page at least.
        pages_max=max(groups, config.select_queries_max),
        table=(),
    )


def tail_pages(config: SwapConfig) -> int:
    """Pages of a layer that its newest tokens stand in: `EngineOptions::tail_pages`."""
    size = config.group_tokens
    return (config.tail_tokens + config.select_queries_max + 2 * size - 2) // size + 1


def _in_least_memory(config: SwapConfig, pages_max: int, need: Need) -> SwapConfig:
    """`config`, or with as many pages as the tail has where that needs less memory.

    A crop puts what it reads back into pages of the reuse buffer; with fewer than the tail has,
    every layer keeps memory for it.
    """
    tail = tail_pages(config)
    if not config.pages_max < tail <= pages_max:
        return config
    roomier = dataclasses.replace(config, pages_max=tail)
    return min(config, roomier, key=lambda candidate: need(candidate)["total"])


def _with_spare_pages(
    config: SwapConfig, pages_max: int, fits: Callable[[SwapConfig], bool]
) -> SwapConfig:
    spare = max(0, pages_max - config.pages_max)

    def wider(n: int) -> SwapConfig:
        return dataclasses.replace(config, pages_max=config.pages_max + n)

    return wider(_largest(spare, lambda n: fits(wider(n))))


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest n in 0..most for which `holds`; it holds for 0 and for all below one it holds."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def too_small(request: Request, need: Mapping[str, int], smallest: SwapConfig) -> str:
    """That a budget does not cover the smallest settings: what does, and what to lower."""
    uses = {name: size for name, size in need.items() if name not in ("total", "record_bytes")}
    made_of = ", ".join(f"{name} {format_bytes(size)}" for name, size in uses.items() if size)
    budget = request.kv_memory_bytes
    return (
        f"kv_memory_bytes: must be at least {need['total']} ({format_bytes(need['total'])}) for "
        f"max_context {request.context} and max_batch {request.batch}, got {budget} "
        f"({format_bytes(budget)}). The minimum is made of {made_of}, with rank {smallest.rank} "
        f"and {smallest.groups_max} groups of {smallest.group_tokens} tokens. Lower max_context, "
        "max_batch, tail_tokens or group_tokens, or raise kv_memory_bytes"
    )
