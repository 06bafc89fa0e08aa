"""What a tuner may search of a preset: its own settings, and values to try.

A grid belongs to a preset of `PRESETS` and says nothing of memory or time. Presets without one
stand in `NO_GRIDS` with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvswap_torch.errors import ConfigError
from kvswap_torch.preset.definition import Shape
from kvswap_torch.preset.registry import find

__all__ = ["GRIDS", "NO_GRIDS", "Grid", "grid_of"]

Values = tuple[Any, ...] | Callable[[Shape], tuple[Any, ...]]
Point = Mapping[str, Any]
"""A value of each axis, by its name."""


@dataclass(frozen=True)
class Grid:
    """Axes in the method's own words, and what their values are as settings.

    Attributes
    ----------
    axes
        Name -> values, or a function that gives them for a model's `Shape`.
    settings
        A model's shape and a point -> settings by their paths, for `SwapConfig.preset`.
    """

    axes: Mapping[str, Values]
    settings: Callable[[Shape, Point], dict[str, Any]]

    def points(self, shape: Shape) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Every point, and its settings."""
        values = [each(shape) if callable(each) else each for each in self.axes.values()]
        for combination in itertools.product(*(dict.fromkeys(each) for each in values)):
            point = dict(zip(self.axes, combination, strict=True))
            yield point, self.settings(shape, point)


ATTENDED = (256, 512, 1024)  # tokens of a step, or that stay
REUSED = 2  # pages for each group of a step


def _selected(group: int, tokens: int) -> dict[str, Any]:
    groups = max(1, -(-tokens // group))
    return {
        "selection.group_tokens": group,
        "selection.top_k_groups": groups,
        "memory.pages_per_layer": max(8, REUSED * groups),
    }


def _pages(least: int) -> Callable[[Shape], tuple[int, ...]]:
    """Sizes of pages of one KV head: none below what the disk reads at once."""
    return lambda shape: tuple(max(size, shape.group_of_head) for size in (least, 2 * least))


def _parts(*shares: float) -> Callable[[Shape], tuple[int, ...]]:
    """Columns of a KV head."""
    return lambda shape: tuple(max(1, round(share * shape.head_dim)) for share in shares)


def _columns(shape: Shape, point: Point) -> dict[str, Any]:
    group = shape.group_of_head
    return {"summary.rank": point["columns"]} | _selected(group, point["tokens"])


def _quest(shape: Shape, point: Point) -> dict[str, Any]:
    return _selected(point["page"], point["tokens"])


def _shadowkv(shape: Shape, point: Point) -> dict[str, Any]:
    kept = {"retention.tokens": point["outliers"] * point["chunk"]}
    return _selected(point["chunk"], point["tokens"]) | kept


def _retained(shape: Shape, point: Point) -> dict[str, Any]:
    """Those that stay, and how many queries say which."""
    return {"retention.tokens": point["tokens"], "retention.window_size": point["window"]}


def _shares(shape: Shape, point: Point) -> dict[str, Any]:
    """A part of the tokens stays, the others are selected."""
    kept = max(1, round(point["share"] * point["tokens"]))
    return _selected(point["page"], point["tokens"] - kept) | {"retention.tokens": kept}


_PAGES: Mapping[str, Values] = {"page": _pages(16), "tokens": ATTENDED}
_COLUMNS: Mapping[str, Values] = {"columns": _parts(0.125, 0.25, 0.5), "tokens": ATTENDED}
_PRKV: Mapping[str, Values] = {"page": _pages(16), "tokens": ATTENDED, "share": (0.25, 0.5)}

GRIDS: Mapping[str, Grid] = {
    "quest": Grid(_PAGES, _quest),
    "arkvale": Grid(_PAGES, _quest),
    "shadowkv": Grid(
        {"chunk": _pages(8), "tokens": ATTENDED, "outliers": (16, 48)},
        _shadowkv,
    ),
    "infinigen": Grid(_COLUMNS, _columns),
    "loki": Grid(_COLUMNS, _columns),
    "think": Grid({"columns": _parts(0.4, 0.6, 0.8), "tokens": ATTENDED}, _columns),
    "dynakv": Grid(
        {"tokens": ATTENDED},
        lambda shape, point: _selected(max(8, shape.group_of_bytes), point["tokens"]),
    ),
    "snapkv": Grid({"tokens": ATTENDED, "window": (16, 32)}, _retained),
    "snapkv+": Grid({"tokens": ATTENDED, "window": (32, 64)}, _retained),
    "h2o": Grid(
        {"tokens": ATTENDED, "recent": (0.25, 0.5)},
        lambda shape, point: {
            "selection.recent_tokens": round(point["recent"] * point["tokens"]),
            "retention.tokens": point["tokens"] - round(point["recent"] * point["tokens"]),
        },
    ),
    "tova": Grid({"tokens": ATTENDED}, lambda shape, point: {"retention.tokens": point["tokens"]}),
    "cake": Grid(
        {"tokens": ATTENDED}, lambda shape, point: {"retention.tokens": point["tokens"] - 32}
    ),
    "prkv": Grid(_PRKV, _shares),
    "arkv-recall": Grid(
        {"tokens": ATTENDED, "share": (0.25, 0.5)},
        lambda shape, point: (
            _selected(4, point["tokens"] - round(point["share"] * point["tokens"]))
            | {"retention.tokens": round(point["share"] * point["tokens"])}
        ),
    ),
    "arkv": Grid(
        {"tokens": ATTENDED, "original": (0.25, None)},
        lambda shape, point: {
            "retention.tokens": point["tokens"] - 32,
            "retention.original_ratio": point["original"],
        },
    ),
    "streaming": Grid(
        {"tokens": ATTENDED},
        lambda shape, point: {"selection.recent_tokens": point["tokens"] - 4},
    ),
}

_FIXED_BY_PAPER = "its settings are those of a table that it is there to reproduce"
NO_GRIDS: Mapping[str, str] = {
    "kvswap": "`kvswap tune` without --preset is its tuner",
    "kvswap-fp8": "`kvswap tune --records fp8` searches it",
    "kvswap-int4": "`kvswap tune --records int4` searches it",
    "kvswap-paper": "`kvswap tune --projection svd_keys --solver greedy` searches as its paper",
    "exact": "it selects nothing and attends everything",
    "infinigen-star": _FIXED_BY_PAPER,
    "infinigen-star-ru": _FIXED_BY_PAPER,
    "prkv-auto": "how many tokens stay follows from the prompt; `prkv` has a share to search",
    "compresskv": "its heads and layers' shares are found by `kvswap calibrate`",
    "arkv-origin": "it is arkv with every kept token as it is; search `arkv`",
    "arkv-quant": "it is arkv with every kept token in e4m3; search `arkv`",
    "window": "it is streaming without the first tokens; search `streaming`",
}


def grid_of(name: str) -> Grid:
    """The grid of a preset.

    Raises
    ------
    ConfigError
        For a name that `find` refuses, or a preset without settings of its own to search; says
        why.
    """
    find(name)
    if name not in GRIDS:
        raise ConfigError(
            f"preset {name}: must have settings of its own to be tuned, has none: {NO_GRIDS[name]}"
        )
    return GRIDS[name]
