"""From a memory budget to settings that fit it.

What a session's memory is made of is written down once, in C++ (`Session::memory_need`); here is
only the search for settings whose need stays within a budget.
"""

from __future__ import annotations

import dataclasses
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

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of K and V of `tokens` tokens in all layers, uncompressed."""
        return 2 * self.layers * self.width * self.element_bytes * tokens


def effective_ranks(config: SwapConfig, shape: ModelShape, calibrated: bool) -> tuple[int, ...]:
    """The rank of each layer on disk: the config's, twice that when it is not calibrated.

    Never more than the keys are wide.
    """
    factor = 1 if calibrated else 2
    return tuple(min(shape.width, factor * rank) for rank in config.ranks(shape.layers))


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


def fit_budget(
    request: Request, shape: ModelShape, config: SwapConfig, need: Need, *, grow: bool = True
) -> SwapConfig:
    """The settings to use under a budget: `config` with rank, groups and pages that fit.

    From the smallest usable settings upwards: first rank and groups together up to the config's
    own, then pages up to its `pages_max`, then, with `grow`, pages and groups until they hold the
    whole context, which makes attention exact. A rank for each layer keeps its proportions.

    Parameters
    ----------
    need
        What settings need for the request's batch and context.
    grow
        Use memory that is left over to hold more than `config` asks for.

    Raises
    ------
    BudgetError
        When even the smallest settings do not fit; names the minimum and what to lower.
    """

    def fits(candidate: SwapConfig) -> bool:
        return need(candidate)["total"] <= request.kv_memory_bytes

    smallest = _between(config, shape, 0)
    if not fits(smallest):
        raise BudgetError(too_small(request, need(smallest), smallest))
    step = _largest(_STEPS, lambda n: fits(_between(config, shape, n)))
    chosen = _with_spare_pages(_between(config, shape, step), config.pages_max, fits)
    if not grow or step < _STEPS or chosen.pages_max < config.pages_max:
        return chosen
    groups = -(-request.context // config.group_tokens)
    return _with_whole_context(chosen, groups, fits)


_STEPS = 64


def _between(config: SwapConfig, shape: ModelShape, step: int) -> SwapConfig:
    """`step` / 64 of the way from the smallest usable settings to `config`'s; no spare pages."""

    def part(low: int, high: int) -> int:
        return high if high <= low else low + (high - low) * step // _STEPS

    rank_min = min(RANK_MIN, shape.width)
    ranks = [part(rank_min, min(rank, shape.width)) for rank in config.ranks(shape.layers)]
    groups = part(GROUPS_MIN, config.groups_max)
    return dataclasses.replace(
        config,
        rank=ranks[0] if isinstance(config.rank, int) else tuple(ranks),
        groups_max=groups,
        # Each query of a short chunk must find a page at least.
        pages_max=max(groups, config.select_queries_max),
        table=(),
    )


def _with_spare_pages(
    config: SwapConfig, pages_max: int, fits: Callable[[SwapConfig], bool]
) -> SwapConfig:
    spare = max(0, pages_max - config.pages_max)

    def wider(n: int) -> SwapConfig:
        return dataclasses.replace(config, pages_max=config.pages_max + n)

    return wider(_largest(spare, lambda n: fits(wider(n))))


def _with_whole_context(
    config: SwapConfig, groups: int, fits: Callable[[SwapConfig], bool]
) -> SwapConfig:
    wider = _with_spare_pages(config, groups, fits)
    if wider.pages_max < groups or wider.groups_max >= groups:
        return wider
    exact = dataclasses.replace(wider, groups_max=groups)
    return exact if fits(exact) else wider


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
