"""What holds between settings of different blocks; types of their own keep the rest apart.

Rules are data, of paths and words of a file, because the C++ reader of files has the same ones
(`cpp_codegen`). A block that may be absent is named by itself and is ``present`` or ``absent``.

No floor makes `retention.tokens` at least `window_size` and a group. The newest tokens are in the
recent window, in addition to those that are retained: PRKV retains 64 tokens of a budget of 256 by
the attention of 64 queries, and TOVA may retain one. Only where a whole group is admitted at once
(arkv) would fewer than that be evicted as soon as they come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvswap_torch.config.nested import BLOCKS, OPTIONAL, POLICY, field_of, settings_of
from kvswap_torch.errors import ConfigError

__all__ = ["EVEN", "FLOORS", "ONLY", "Even", "Floor", "Only", "check_constraints", "values_of"]


@dataclass(frozen=True)
class Floor:
    """`path` is at least `floor`, and why; with a `policy` only where that one is named."""

    path: str
    floor: str
    why: str
    policy: str = ""


@dataclass(frozen=True)
class Only:
    """A setting at another value than its default: `owner` is one of `words`, or none of `but`.

    With `values` only those values are meant, and others are free. Words are values as JSON has
    them, without quotes.
    """

    path: str
    owner: str
    words: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Even:
    """A number, or each of several, is even where `owner` is `word`, and why."""

    path: str
    owner: str
    word: str
    why: str


FLOORS = (
    Floor("memory.pages_per_layer", "selection.top_k_groups",
          "since what a step attends must be in memory"),
    Floor("memory.pages_per_layer", "selection.max_step_tokens", "a page for each query's choice"),
    Floor("clusters.max_tokens", "clusters.target_tokens", "which a cluster has on average"),
    Floor("retention.tokens", "selection.group_tokens", "since a group is admitted at once",
          "arkv"),
    Floor("retention.tokens", "selection.group_tokens", "since whole groups are retained",
          "key_outliers"),
    Floor("retention.tokens", "retention.min_layer_tokens",
          "since it is what layers have on average", "compresskv"),
    Floor("storage.max_read_bytes", "storage.coalesce_gap_bytes",
          "since a coalesced read holds its gaps"),
)  # fmt: skip
ONLY = (
    *(
        Only(f"summary.{name}", "summary.kind", ("low_rank",))
        for name in ("rank", "projection_file", "projection", "coarse_rank")
    ),
    Only("summary.half_width_weight", "summary.kind", ("min_max",)),
    Only("clusters", "summary.kind", ("centroid",)),
    Only("summary.kind", "clusters", ("present",), values=("centroid",)),
    Only("memory.replacement", "clusters", ("present",), values=("largest_cluster",)),
    Only("storage.layout", "clusters", ("present",), values=("paired_pools",)),
    Only("storage.pool_slack_pages", "storage.layout", ("paired_pools",)),
    Only("selection.new_group_ratio", "clusters", ("absent",), why="since clusters change"),
    Only("selection.new_group_ratio", "summary.kind", but=("none",),
         why="since nothing is selected"),
    Only("selection.score", "summary.kind", ("low_rank",), values=("mass_sum", "mass_max")),
    Only("selection.score", "summary.kind", but=("centroid",), values=("logit_max",),
         why="since clusters.score says it of clusters"),
    Only("selection.score", "summary.kind", but=("user",), values=("logit_max",),
         why="since scores come from outside"),
    Only("summary.dtype", "summary.kind", ("low_rank",), values=("int4",)),
    Only("summary.dtype", "summary.kind", but=("centroid",), why="since centroids are float32"),
    Only("summary.dtype", "summary.kind", but=("user",), why="since there is no summary"),
    Only("clusters.max_pending_tokens", "clusters.update", but=("local",),
         why="since tokens wait for four clusters' worth"),
    Only("storage.kv_dtype", "clusters", ("absent",), values=("int4",),
         why="since clusters are packed anew, and four bits would round each time"),
    Only(POLICY, "clusters", ("absent",), why="which has not been built for clusters"),
    Only(POLICY, "summary.kind", ("none",), values=("recent_only", "cake", "compresskv")),
    Only(POLICY, "summary.kind", but=("none",), values=("key_outliers",),
         why="since there are no groups to be left out of"),
    Only("retention.budget", "summary.kind", but=("none",), why="since no groups are selected"),
    Only("retention.exclude_from_summary", "summary.kind", ("min_max", "mean")),
    Only("retention.scoring_heads", "selection.heads", ("joint",)),
    Only("retention.refresh_scores", "retention.refresh_interval", but=("0",),
         why="since nothing is decided while decoding"),
    Only("retention.budget_unit", "retention.original_ratio", but=("1",),
         why="since no token is rounded"),
    Only("retention.oq_temperatures", "retention.original_ratio", ("null",)),
    Only("audit", "summary.kind", but=("none",), why="since nothing is selected"),
    Only("summary.rerank_fraction", "summary.coarse_rank", but=("null",),
         why="since all groups are ranked once"),
    Only("summary.coarse_rank", "summary.dtype", but=("int4",),
         why="which has not been built for two stages"),
    Only("summary.coarse_rank", "selection.score", but=("mass_sum", "mass_max"),
         why="since a head's softmax needs every token's product"),
    Only("summary.coarse_rank", "summary.projection",
         but=("pca_per_head", "skewed", "channels", "rope_pairs"),
         why="since its first dimensions are one head's"),
)  # fmt: skip
EVEN = (
    Even("summary.rank", "summary.projection", "rope_pairs",
         "since both channels of a pair are taken"),
)  # fmt: skip

Shown = Callable[[str, Any], tuple[str, Any]]
"""(path, value) -> the name and the value that a message has."""


def values_of(config: Any) -> dict[str, Any]:
    """Every setting that a config has by its path, and of blocks that may be absent whether."""
    values = settings_of(config)
    values[POLICY] = config.retention.POLICY if config.retention is not None else "none"
    for name in OPTIONAL[1:]:
        values[name] = "absent" if getattr(config, name) is None else "present"
    return values


def default_of(path: str) -> Any:
    """What a rule takes for a setting that is left out."""
    if path in BLOCKS:
        return "absent"
    return "none" if path == POLICY else field_of(path).default


def word_of(value: Any) -> str:
    """A value as messages and rules name it: whole floats without a point, as C++ writes them."""
    if value is None:
        return "null"
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else str(value)


def listed(value: Any) -> Any:
    """As a file has it."""
    return list(value) if isinstance(value, tuple) else value


def check_constraints(config: Any, shown: Shown = lambda path, value: (path, value)) -> None:
    """Raises `ConfigError` for the first rule that does not hold.

    Parameters
    ----------
    config
        An object with the blocks.
    shown
        What messages call a setting and its value; version 1 had other names.
    """
    values = values_of(config)
    for rule in FLOORS:
        _check_floor(rule, values, shown)
    for only in ONLY:
        _check_only(only, values, shown)
    for even in EVEN:
        _check_even(even, values, shown)


def _check_floor(rule: Floor, values: dict[str, Any], shown: Shown) -> None:
    if rule.path not in values or rule.floor not in values:
        return
    if rule.policy and values[POLICY] != rule.policy:
        return
    value, least = values[rule.path], values[rule.floor]
    if value < least:
        name, floor = shown(rule.path, value)[0], shown(rule.floor, least)[0]
        raise ConfigError(f"{name}: must be at least {floor} ({least}), {rule.why}, got {value}")


def _check_only(rule: Only, values: dict[str, Any], shown: Shown) -> None:
    if rule.path not in values or rule.owner not in values:
        return
    value, owner = values[rule.path], values[rule.owner]
    if value == default_of(rule.path) or (rule.values and value not in rule.values):
        return
    word = word_of(owner)
    if word in rule.words or (rule.but and word not in rule.but):
        return
    name, got = shown(rule.path, value)
    of, owned = shown(rule.owner, owner)
    words = ", ".join(word_of(shown(rule.owner, each)[1]) for each in rule.words)
    why = rule.why or f"since it belongs to {words}"
    raise ConfigError(
        f"{name}: must be left out where {of} is {word_of(owned)}, {why}, got {listed(got)!r}"
    )


def _check_even(rule: Even, values: dict[str, Any], shown: Shown) -> None:
    if rule.path not in values or word_of(values.get(rule.owner)) != rule.word:
        return
    value = values[rule.path]
    if any(one % 2 for one in (value if isinstance(value, tuple) else (value,))):
        name, owner = shown(rule.path, value)[0], shown(rule.owner, rule.word)[0]
        raise ConfigError(
            f"{name}: must be even where {owner} is {rule.word}, {rule.why}, got {listed(value)}"
        )
