"""From a memory budget to settings that fit it.

What a session's memory is made of, and the search for settings whose need stays within a budget,
are written down once, in C++ (`kvswap::memory_need`, csrc/kvswap/budget.h).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvswap_torch.config import SwapConfig
from kvswap_torch.config.engine import flat_settings
from kvswap_torch.errors import ConfigError
from kvswap_torch.native import cache_options
from kvswap_torch.widths import KeyValueWidths

Need = Callable[[SwapConfig], Mapping[str, int]]
"""Settings -> bytes by use, and their sum as "total"; never less for more rank, groups or pages.

As "least" the smallest budget that would hold its own total: write buffers grow with a budget.
"""


@dataclass(frozen=True)
class ModelShape(KeyValueWidths):
    """The part of a model that is kept on disk.

    Parameters
    ----------
    layers
        Layers on disk: the full-attention ones.
    heads, kv_heads, head_dim
        Attention heads, key-value heads, and their width.
    element_bytes
        Bytes of one element of K or V.
    sides
        2: K and V; 1: K alone, which is the values too, as in latent attention.
    value_dim
        Of V in records, at most `head_dim`; 0: as wide as K.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    sides: int = 2
    value_dim: int = 0

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of K and V of `tokens` tokens in all layers, uncompressed."""
        return self.layers * self.kv_heads * self.head_width * self.element_bytes * tokens


def effective_ranks(config: SwapConfig, shape: ModelShape, calibrated: bool) -> tuple[int, ...]:
    """The rank of each layer on disk: the config's, twice that when it is not calibrated.

    Never more than the keys are wide. None where rows have no rank.
    """
    from kvswap_torch import _C

    return tuple(_C.effective_ranks(native_options(config, shape, is_calibrated=calibrated)))


def native_options(config: SwapConfig, shape: ModelShape, **others: Any) -> Any:
    """A `kvswap_torch._C.CacheOptions` of these settings and that shape, with `others` beside."""
    return cache_options(
        **flat_settings(config),
        layers=shape.layers,
        query_heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        sides=shape.sides,
        value_dim=shape.value_dim,
        **others,
    )


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
    request: Request,
    shape: ModelShape,
    config: SwapConfig,
    need: Need,
    *,
    may_share: bool = False,
    keeps_columns: bool = False,
) -> SwapConfig:
    """The settings to use under a budget: `config` with rank, groups and pages that fit.

    From the smallest usable settings upwards: first rank and groups together up to the config's
    own, then pages up to its `pages_per_layer`. A rank for each layer keeps its proportions. Where
    retained tokens are attended in addition to selected groups, they are lowered in the same
    proportion as the groups.

    Parameters
    ----------
    need
        What settings need for the request's batch and context.
    may_share
        Where more than a quarter of the groups would be missing, two layers may have pages at a
        time (`memory.resident_layers`) if that keeps a quarter more: every step reads them all.
    keeps_columns
        Groups and pages alone are lowered: columns belong to what a method is.

    Raises
    ------
    BudgetError
        When even the smallest settings do not fit; names the minimum and what to lower.
    """

    return _searched("fit_budget", request, shape, config, need, may_share, keeps_columns)


def spend_budget(
    request: Request,
    shape: ModelShape,
    config: SwapConfig,
    need: Need,
    on_device: bool = False,
    rank_max: int | None = None,
) -> SwapConfig:
    """The settings that make the most of a budget, where nobody has calibrated or asked for any.

    Where the whole context fits it is kept, and attention is exact. Otherwise columns, their
    precision and groups are chosen together, by what they are worth: of every number of columns
    with the most groups that then fit, up to `config`'s, the pair that misses least. Columns come
    first: 8 of them find a tenth of what is asked for with 100 groups, and 32 find nine tenths with
    8. int4 rows have more of them in the same bytes. Where much is missed all the same, two layers
    have pages at a time (`memory.resident_layers`): several times as many groups for the same
    bytes, which every step reads again. What is left over keeps more pages.

    Parameters
    ----------
    config
        Everything else; rank is half the columns, since it is doubled without a calibration.
    on_device
        Pages are a device's, which has no kernels for int4 rows: they are not chosen, nor are
        pages shared, which is measured on none.
    rank_max
        No more, as of projections that are there.

    Raises
    ------
    BudgetError
        As `fit_budget`.
    """

    return _searched("spend_budget", request, shape, config, need, on_device, rank_max)


def _searched(
    name: str, request: Request, shape: ModelShape, config: SwapConfig, need: Need, *how: Any
) -> SwapConfig:
    """What C++'s search of that name chooses: rank, groups, pages, whose, and rows' precision."""
    from kvswap_torch import _C

    def sized(
        rank: int | list[int],
        groups_max: int,
        pages_max: int,
        summary_dtype: str,
        resident_layers: int | None,
        keep_tokens: int,
    ) -> SwapConfig:
        sizes = {
            "summary.dtype": {"model": "auto"}.get(summary_dtype, summary_dtype),
            "selection.top_k_groups": groups_max,
            "memory.pages_per_layer": pages_max,
            "memory.resident_layers": resident_layers,
        }
        if config.takes_projections:
            sizes["summary.rank"] = rank
        if keep_tokens != options.keep_tokens:
            sizes["retention.tokens"] = keep_tokens
        return dataclasses.replace(config, solutions=()).with_settings(sizes)

    def uses(*sizes: Any) -> dict[str, int]:
        return dict(need(sized(*sizes)))

    options, asked = native_options(config, shape), _C.Request(*_plain(request))
    return sized(*getattr(_C, name)(options, asked, uses, *how))


def too_small(request: Request, need: Mapping[str, int], smallest: SwapConfig) -> str:
    """That a budget does not cover the smallest settings: what does, and what to lower."""
    from kvswap_torch import _C

    options = cache_options(**flat_settings(smallest))
    return _C.too_small(options, _C.Request(*_plain(request)), dict(need))


def _plain(request: Request) -> tuple[int, int, int]:
    return request.kv_memory_bytes, request.context, request.batch
