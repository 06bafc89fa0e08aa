"""From a memory budget to settings: what a session's memory is made of, and what fits.

`session_bytes` is the one place where the ledger's formulas are written down in Python; the C++
ledger charges by the same ones. `fit_budget` chooses rank, groups and pages so that they hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from kvswap_torch.config import SwapConfig
from kvswap_torch.errors import BudgetError, ConfigError
from kvswap_torch.memory_size import format_bytes

ALIGNMENT = 4096  # of a record on disk and of a page in memory, bytes
SUMMARY_BLOCK = 16  # a summary grows by blocks of this many tokens
WRITE_CHUNK = 4 << 20  # bytes of one staging buffer of the write queue
WRITE_CHUNKS = 3
TABLE_BYTES = 8  # per group: its place on disk and its checksum

RANK_MIN = 8
GROUPS_MIN = 8


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


def session_bytes(
    config: SwapConfig, shape: ModelShape, context: int, batch: int, *, calibrated: bool
) -> dict[str, int]:
    """Memory that a session needs for `batch` sequences of `context` tokens, by use.

    Returns
    -------
    dict
        ``pages`` (reuse buffer, sinks, tail, one scrap page per layer and sequence), ``summary``
        (low-rank keys), ``tables`` (8 bytes a group), ``staging`` (writes behind) and
        ``projections``, in bytes.
    """
    group = config.group_tokens
    page = _round_up(2 * shape.width * group * shape.element_bytes, ALIGNMENT)
    ranks = effective_ranks(config, shape, calibrated)
    rows = _round_up(context, SUMMARY_BLOCK)
    groups = -(-context // group)
    per_sequence = config.pages_max + _sink_pages(config) + _tail_pages(config) + 1
    if config.summary_dtype == "int8":
        row_bytes = sum(ranks) + 4 * shape.layers
    else:
        row_bytes = sum(ranks) * shape.element_bytes
    written = 2 * shape.width * shape.element_bytes * context * batch
    return {
        "pages": shape.layers * batch * per_sequence * page,
        "summary": batch * rows * row_bytes,
        "tables": shape.layers * batch * groups * TABLE_BYTES,
        "staging": WRITE_CHUNKS * min(WRITE_CHUNK, _round_up(written, ALIGNMENT)),
        "projections": 2 * 4 * shape.width * sum(ranks),
    }


def fit_budget(
    kv_memory_bytes: int,
    shape: ModelShape,
    context: int,
    batch: int,
    config: SwapConfig | None = None,
    *,
    calibrated: bool = False,
    grow: bool = True,
) -> SwapConfig:
    """The settings to use under a budget: `config` with rank, groups and pages that fit.

    From the smallest usable settings upwards: first rank and groups together up to the config's
    own, then pages up to its `pages_max`, then, with `grow`, groups and pages alike until they hold
    the whole context. A rank for each layer keeps its proportions.

    Parameters
    ----------
    kv_memory_bytes
        The budget, bytes.
    context, batch
        Tokens per sequence and sequences that must fit.
    calibrated
        Whether a projection file is used; without one the rank is doubled.
    grow
        Use memory that is left over to hold more than `config` asks for.

    Raises
    ------
    BudgetError
        When even the smallest settings do not fit; names the minimum and what to lower.
    """
    config = config or SwapConfig()
    if context < 1 or batch < 1 or kv_memory_bytes < 1:
        raise ConfigError(
            "fit_budget: kv_memory_bytes, max_context and max_batch must be positive, got "
            f"{kv_memory_bytes}, {context}, {batch}"
        )

    def fits(candidate: SwapConfig) -> bool:
        parts = session_bytes(candidate, shape, context, batch, calibrated=calibrated)
        return sum(parts.values()) <= kv_memory_bytes

    smallest = _between(config, shape, 0)
    if not fits(smallest):
        parts = session_bytes(smallest, shape, context, batch, calibrated=calibrated)
        raise BudgetError(_too_small(kv_memory_bytes, parts, smallest, context, batch))
    step = _largest(_STEPS, lambda n: fits(_between(config, shape, n)))
    chosen = _with_spare_pages(_between(config, shape, step), config.pages_max, fits)
    if not grow or step < _STEPS or chosen.pages_max < config.pages_max:
        return chosen
    return _with_whole_context(chosen, context, fits)


_STEPS = 64


def _between(config: SwapConfig, shape: ModelShape, step: int) -> SwapConfig:
    """`step` / 64 of the way from the smallest usable settings to `config`'s; no spare pages."""

    def part(low: int, high: int) -> int:
        return high if high <= low else low + (high - low) * step // _STEPS

    rank_min = min(RANK_MIN, shape.width)
    ranks = [part(rank_min, min(rank, shape.width)) for rank in config.ranks(shape.layers)]
    groups = part(GROUPS_MIN, config.groups_max)
    rank = ranks[0] if isinstance(config.rank, int) else tuple(ranks)
    return dataclasses.replace(config, rank=rank, groups_max=groups, pages_max=groups, table=())


def _with_spare_pages(
    config: SwapConfig, pages_max: int, fits: Callable[[SwapConfig], bool]
) -> SwapConfig:
    spare = max(0, pages_max - config.pages_max)

    def wider(n: int) -> SwapConfig:
        return dataclasses.replace(config, pages_max=config.pages_max + n)

    return wider(_largest(spare, lambda n: fits(wider(n))))


def _with_whole_context(
    config: SwapConfig, context: int, fits: Callable[[SwapConfig], bool]
) -> SwapConfig:
    """More pages, and where those hold the whole context, that many groups: then it is exact."""
    groups = -(-context // config.group_tokens)
    wider = _with_spare_pages(config, groups, fits)
    if wider.pages_max < groups or wider.groups_max >= groups:
        return wider
    return dataclasses.replace(wider, groups_max=groups)


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


def _sink_pages(config: SwapConfig) -> int:
    if config.sink_tokens == 0:
        return 0
    # Padding may shift the first valid tokens to the middle of a group.
    return -(-config.sink_tokens // config.group_tokens) + 1


def _tail_pages(config: SwapConfig) -> int:
    """At rest the tail holds less than tail_tokens + G; a short chunk comes on top."""
    group = config.group_tokens
    return -(-(config.tail_tokens + group - 1 + config.select_queries_max) // group) + 1


def _too_small(
    budget: int, parts: dict[str, int], smallest: SwapConfig, context: int, batch: int
) -> str:
    made_of = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    return (
        f"kv_memory_bytes: must be at least {sum(parts.values())} "
        f"({format_bytes(sum(parts.values()))}) for max_context {context} and max_batch {batch}, "
        f"got {budget} ({format_bytes(budget)}). The minimum is made of {made_of}, with rank "
        f"{smallest.rank} and {smallest.groups_max} groups of {smallest.group_tokens} tokens. "
        "Lower max_context, max_batch, tail_tokens or group_tokens, or raise kv_memory_bytes"
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
