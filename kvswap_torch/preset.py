"""Presets: published systems as settings of this one engine.

A preset is one entry of `PRESETS`. It becomes a plain `SwapConfig`, which a file keeps: a preset
that changes later never alters a file. One of parts that are there is one more entry.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvswap_torch.config import SETTINGS, ModelIdentity, SwapConfig
from kvswap_torch.errors import ConfigError

__all__ = ["MISSING", "PRESETS", "Preset", "Shape", "find", "presets"]

TOKENS = 1024  # attended by methods whose papers give a budget of tokens


@dataclass(frozen=True)
class Shape:
    """What settings of a preset may follow from; the defaults are a Llama's of 8B parameters.

    Attributes
    ----------
    layers
        On disk.
    kv_heads, head_dim, element_bytes
        Of the model's keys.
    alignment_bytes
        What the disk reads at once.
    """

    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    element_bytes: int = 2
    alignment_bytes: int = 4096

    @classmethod
    def of(cls, model: ModelIdentity | None, alignment_bytes: int = 4096) -> Shape:
        """Of a model, as far as it is known."""
        if not isinstance(model, ModelIdentity):  # what it is not, SwapConfig says
            return cls()
        known = {
            "layers": model.layers,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "element_bytes": {None: None, "float32": 4}.get(model.dtype, 2),
        }
        known = {name: value for name, value in known.items() if value is not None}
        return cls(**known, alignment_bytes=alignment_bytes)

    @property
    def width(self) -> int:
        """Numbers of one token's keys."""
        return self.kv_heads * self.head_dim

    @property
    def group_of_head(self) -> int:
        """Tokens of the smallest group of one KV head whose record fills half of what is read."""
        return self._group_filling(2 * self.head_dim * self.element_bytes)

    @property
    def group_of_bytes(self) -> int:
        """The same of all KV heads, in records of one byte a number; at least four tokens."""
        return max(4, self._group_filling(2 * self.width))

    def _group_filling(self, token_bytes: int) -> int:
        return -(-((self.alignment_bytes + 1) // 2) // token_bytes)


Value = Any | Callable[[Shape], Any]


@dataclass(frozen=True)
class Preset:
    """One system.

    Attributes
    ----------
    name, paper
        What it is called, and where it was published.
    take, leave
        When to take it, and when not: a sentence each.
    settings
        Of `SwapConfig`, the others at their defaults; a function is given the model's `Shape`.
    calibrate
        What is better calibrated, or must be; empty: nothing.
    differences
        From its paper, a sentence each.
    divides
        It divides any budget between columns, groups and pages; of the others columns belong to
        what they are, and a comparison at equal bytes leaves them.
    """

    name: str
    paper: str
    take: str
    leave: str
    settings: Mapping[str, Value]
    calibrate: str = ""
    differences: tuple[str, ...] = ()
    divides: bool = False

    def config(self, shape: Shape = Shape(), **overrides: Any) -> SwapConfig:
        """Its settings for a model, `overrides` in the place of some.

        Raises
        ------
        ConfigError
            For an override that is no setting, that would make another method of it, or that its
            method does not have.
        """
        where = f"preset {self.name}"
        for name in overrides:
            if name not in (*SETTINGS, "model"):
                near = difflib.get_close_matches(name, SETTINGS, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"{where}: overrides must be settings, got {name}{hint}")
        rows = self.settings.get("rows", "low_rank")
        if overrides.get("rows", rows) != rows:
            raise ConfigError(
                f"{where}: rows must stay {rows}, which make it what it is, got "
                f"{overrides['rows']!r}; SwapConfig() takes any settings"
            )
        made = {
            name: value(shape) if callable(value) else value
            for name, value in self.settings.items()
        }
        if "groups_max" in overrides and "pages_max" not in overrides:
            made["pages_max"] = max(made.get("pages_max", 200), overrides["groups_max"])
        try:
            return SwapConfig(**made | overrides)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def _groups(tokens: int) -> Callable[[Shape], int]:
    """Groups of one KV head that hold so many tokens."""
    return lambda shape: -(-tokens // shape.group_of_head)


_BOX = {
    "rows": "box",
    "heads": "each",
    "score": "max",
    "replacement": "lru",
    "exact_layers": lambda shape: tuple(range(min(2, shape.layers))),
}
_STAR = {
    "projection_kind": "skewed",
    "group_tokens": 1,
    "look_ahead": True,
    "sink_tokens": 0,
    "rank": lambda shape: max(1, round(0.3 * shape.width)),
    "groups_max": 400,
}
_RESTORED = "the two exact layers are restored from disk where they outgrow their pages"
_NEWEST = "the newest 32 tokens stay in memory, since a token is chosen once its group is sealed"
_ALIGNED = "groups of one token only where the disk reads so little at once, else of the fewest"
_FIXED = "a fixed number of tokens for every layer and head, where the paper varies it"

PRESETS = (
    Preset(
        "kvswap",
        "KVSwap",
        "What you get without a config: nothing is calibrated, and a budget is divided for you.",
        "Where a disk hides no reads: `kvswap tune` finds settings that read ahead.",
        {"score": "mass", "rank": lambda shape: min(32, shape.width)},
        "better with `kvswap tune`: half the columns, and reads that are hidden",
        (
            "groups are scored by the attention that heads pay them, not by summed products",
            "the best bilinear form of queries and keys, not the SVD of the keys",
            "each layer chooses with its own query until a calibration says which are predictable",
        ),
        divides=True,
    ),
    Preset(
        "kvswap-fp8",
        "KVSwap",
        "As kvswap with half the bytes on disk, in pages and read: records in e4m3.",
        "Where answers must be the full cache's own: what leaves the tail is rounded.",
        {
            "score": "mass",
            "rank": lambda shape: min(32, shape.width),
            "records": "fp8",
            "group_tokens": lambda shape: shape.group_of_bytes,
            "groups_max": lambda shape: -(-400 // shape.group_of_bytes),
            "pages_max": lambda shape: max(16, -(-800 // shape.group_of_bytes)),
        },
        "as kvswap",
        ("those of kvswap", "K and V are rounded to three bits behind the leading one"),
        divides=True,
    ),
    Preset(
        "kvswap-paper",
        "KVSwap",
        "To compare with the published form.",
        "For answers that must be found: layers that cannot be predicted are predicted too.",
        {
            "projection_kind": "svd_keys",
            "look_ahead": True,
            "sink_tokens": 0,
            "rank": lambda shape: min(32, shape.width),
        },
        "the paper calibrates the SVD of the keys beforehand; else it is made of the prompt",
        ("without a calibration the rank is doubled", "positions and padding are kept exact"),
    ),
    Preset(
        "exact",
        "FlexGen",
        "Ground truth: every layer attends everything, restored from disk in every step.",
        "Where tokens per second matter: each one reads the whole cache.",
        {"rows": "none", "group_tokens": 16, "groups_max": 96, "pages_max": 96},
        "",
        ("the cache alone is on disk; weights and activations stay where the model has them",),
    ),
    Preset(
        "quest",
        "Quest",
        "Tables and code, where low rank is weak: a bound instead of a guess, no calibration.",
        "In small budgets: its boxes take one part in 16 of the KV cache.",
        {**_BOX, "group_tokens": 16, "groups_max": TOKENS // 16, "pages_max": TOKENS // 8}
        | {"sink_tokens": 0, "tail_tokens": 16},
        "",
        (
            "KV heads choose, each by the largest bound of its query heads; query heads in the "
            "paper",
            "the newest page is always attended",
            _RESTORED,
        ),
    ),
    Preset(
        "arkvale",
        "ArkVale",
        "As quest with half its memory: larger pages, and the first and newest ones stay.",
        "In small budgets: its boxes take one part in 32 of the KV cache.",
        {**_BOX, "group_tokens": 32, "groups_max": TOKENS // 32, "pages_max": TOKENS // 16}
        | {"sink_tokens": 64, "tail_tokens": 64},
        "",
        (
            "pages leave by when they were last used, not by their score",
            "the cuboid is the digest; the paper has balls too",
            _RESTORED,
        ),
    ),
    Preset(
        "infinigen",
        "InfiniGen",
        "To reproduce a table.",
        "On any disk: single tokens of single heads are small reads, and nothing is reused.",
        {
            "projection_kind": "skewed",
            "heads": "each",
            "look_ahead": True,
            "sink_tokens": 0,
            "group_tokens": lambda shape: shape.group_of_head,
            "rank": lambda shape: max(1, round(0.3 * shape.head_dim)),
            "groups_max": _groups(400),
            "pages_max": _groups(400),
            "replacement": "none",
        },
        "the paper finds the skew beforehand; else it is made of the prompt",
        (_FIXED, _ALIGNED, _NEWEST),
    ),
    Preset(
        "infinigen-star",
        "KVSwap, 4.2",
        "To reproduce a table: InfiniGen with one choice for all heads.",
        "On any disk: single tokens are small reads, and nothing is reused.",
        {**_STAR, "pages_max": 400, "replacement": "none"},
        "as infinigen",
        (_FIXED, _NEWEST),
    ),
    Preset(
        "infinigen-star-ru",
        "KVSwap, 4.2",
        "To reproduce a table: infinigen-star with a reuse buffer.",
        "On any disk: single tokens are small reads.",
        {**_STAR, "pages_max": 800, "replacement": "fifo"},
        "as infinigen",
        (_FIXED, _NEWEST),
    ),
    Preset(
        "loki",
        "Loki",
        "To reproduce a table.",
        "In small budgets: a quarter of every key stays in memory, an eighth of the KV cache.",
        {
            "projection_kind": "pca_per_head",
            "heads": "each",
            "sink_tokens": 0,
            "group_tokens": lambda shape: shape.group_of_head,
            "rank": lambda shape: max(1, shape.head_dim // 4),
            "groups_max": _groups(TOKENS),
            "pages_max": _groups(2 * TOKENS),
            "replacement": "lru",
        },
        "the paper finds the components beforehand; else they are made of the prompt",
        ("a fixed number of tokens, where the paper takes a share of the context", _ALIGNED)
        + (_NEWEST,),
    ),
)

_DROPS = "a keeper that drops tokens for good"
_STATIC = "a static set of tokens that is chosen anew every few steps"
_CLUSTERS = "rows of clusters"
_OTHER = "projections of single channels"
#: Systems that are known and cannot be had yet: what is missing.
MISSING = {
    **dict.fromkeys(("snapkv", "streaming", "window", "h2o", "tova", "cake", "compresskv"), _DROPS),
    **dict.fromkeys(("arkv-origin", "lazyeviction", "defensivekv", "dapq", "d2o"), _DROPS),
    **dict.fromkeys(("kvmerger", "mikv", "arkv", "arkv-quant"), _DROPS),
    **dict.fromkeys(("prkv", "snapkv+"), _STATIC),
    **dict.fromkeys(("clusterkv", "dynakv", "pqcache"), _CLUSTERS),
    **dict.fromkeys(("think", "fasa"), _OTHER),
    "shadowkv": "a keeper of outliers (its landmarks are rows=mean)",
}


def presets() -> tuple[Preset, ...]:
    """Every preset that can be had, the default first."""
    return PRESETS


def find(name: str) -> Preset:
    """The preset of that name.

    Raises
    ------
    ConfigError
        Naming the part that a known system still lacks, or the nearest names.
    """
    for preset in PRESETS:
        if preset.name == name:
            return preset
    if name in MISSING:
        raise ConfigError(
            f"preset: {name} needs {MISSING[name]}, which this version does not have; "
            "`kvswap presets` lists those it has"
        )
    names = [preset.name for preset in PRESETS]
    near = difflib.get_close_matches(str(name), [*names, *MISSING], 3, 0.5)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise ConfigError(f"preset: must be one of {', '.join(names)}, got {name!r}{hint}")
