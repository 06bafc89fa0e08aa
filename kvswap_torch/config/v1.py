"""Version 1 of a config file: 61 flat settings. Frozen: it says what such files mean, for ever.

A file leaves out what came later than it, and means version 1's defaults. ``make schema`` writes
the tables for the C++ reader too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from kvswap_torch.config.constraints import check_constraints, listed
from kvswap_torch.config.fields import may_be_list
from kvswap_torch.config.nested import (
    BLOCKS,
    POLICY,
    block_from,
    difference,
    field_of,
    settings_of,
)
from kvswap_torch.config.retention import POLICIES
from kvswap_torch.config.solution import Solution, solution_from
from kvswap_torch.errors import ConfigError

__all__ = ["DEFAULTS", "FIELDS", "NOT_SOLVABLE", "PATHS", "VALUES", "blocks_of", "upgrade"]

#: Version 1's name -> version 2's path, in version 1's order.
PATHS = {
    "reader": "storage.io_backend",
    "io_mode": "storage.io_mode",
    "read_depth": "storage.queue_depth",
    "merge_gap_bytes": "storage.coalesce_gap_bytes",
    "merge_bytes_max": "storage.max_read_bytes",
    "checksum": "storage.verify_checksums",
    "io_timeout_seconds": "storage.io_timeout_seconds",
    "wipe_on_close": "storage.wipe_on_close",
    "device_model": "storage.simulated_device",
    "disk_quota_bytes": "storage.max_disk_bytes",
    "cluster_tokens": "clusters.target_tokens",
    "cluster_tokens_max": "clusters.max_tokens",
    "split_factor": "clusters.split_variance_ratio",
    "pending_tokens": "clusters.max_pending_tokens",
    "cluster_score": "clusters.score",
    "cluster_update": "clusters.update",
    "pool_slack_pages": "storage.pool_slack_pages",
    "group_tokens": "selection.group_tokens",
    "grouping": "clusters",
    "heads": "selection.heads",
    "rows": "summary.kind",
    "records": "storage.kv_dtype",
    "rank": "summary.rank",
    "summary_dtype": "summary.dtype",
    "score": "selection.score",
    "score_columns": "summary.coarse_rank",
    "score_share": "summary.rerank_fraction",
    "bound_weight": "summary.half_width_weight",
    "groups_max": "selection.top_k_groups",
    "pages_max": "memory.pages_per_layer",
    "resident_layers": "memory.resident_layers",
    "sink_tokens": "selection.sink_tokens",
    "tail_tokens": "selection.recent_tokens",
    "replacement": "memory.replacement",
    "select_queries_max": "selection.max_step_tokens",
    "look_ahead": "prefetch.mode",
    "true_query_layers": "prefetch.skip_layers",
    "exact_layers": "selection.dense_layers",
    "keeper": "retention.policy",
    "keep_tokens": "retention.tokens",
    "keep_share": "retention.budget",
    "keep_window": "retention.window_size",
    "keep_pool": "retention.kernel_size",
    "keep_interval": "retention.refresh_interval",
    "keep_scores": "retention.refresh_scores",
    "keep_variance": "retention.variance_weight",
    "keep_slack": "retention.low_watermark",
    "keep_ratio": "retention.original_ratio",
    "keep_count": "retention.budget_unit",
    "keep_temperatures": "retention.oq_temperatures",
    "keep_preference": "retention.preference_temperatures",
    "keep_layer_shares": "retention.layer_weights",
    "keep_layer_least": "retention.min_layer_tokens",
    "keep_layer_most": "retention.max_layer_multiple",
    "keep_heads": "retention.scoring_heads",
    "audit_every": "audit.interval",
    "audit_groups": "audit.sample_groups",
    "missed_mass_max": "audit.max_missed_mass",
    "layout": "storage.layout",
    "projection_file": "summary.projection_file",
    "projection_kind": "summary.projection",
}
#: Every word of a setting whose words changed -> version 2's.
VALUES: dict[str, dict[Any, Any]] = {
    "reader": {"auto": "auto", "uring": "io_uring", "threads": "threads", "sync": "sync"},
    "cluster_score": (
        scores := {
            "sum": "logit_sum",
            "max": "logit_max",
            "mass": "mass_sum",
            "max_mass": "mass_max",
        }
    ),
    "grouping": {"runs": "absent", "clusters": "present"},
    "heads": {"all": "joint", "each": "per_head"},
    "rows": {
        "low_rank": "low_rank",
        "box": "min_max",
        "mean": "mean",
        "centroid": "centroid",
        "given": "user",
        "none": "none",
    },
    "records": {"model": "auto", "fp8": "fp8_e4m3", "int4": "int4"},
    "summary_dtype": {"model": "auto", "int8": "int8", "int4": "int4"},
    "score": scores,
    "replacement": {
        "fifo": "fifo",
        "lru": "lru",
        "unused": "last_step_only",
        "none": "no_reuse",
        "score": "least_attended",
        "clusters": "largest_cluster",
    },
    "look_ahead": {False: "off", True: "trust"},
    "keeper": {
        "none": "none",
        "newest": "recent_only",
        "observed": "snapkv",
        "heavy": "h2o",
        "arkv": "arkv",
        "cake": "cake",
        "outliers": "key_outliers",
        "given": "user",
    },
    "keep_share": {"fixed": "fixed", "auto": "prompt_adaptive"},
    "keep_scores": {"attended": "attended", "disk": "all_tokens"},
    "layout": {"sequence": "append", "pools": "paired_pools"},
}
#: What a file means that leaves a setting out.
DEFAULTS: dict[str, Any] = {
    "reader": "auto",
    "io_mode": "auto",
    "read_depth": 64,
    "merge_gap_bytes": 16384,
    "merge_bytes_max": 262144,
    "checksum": True,
    "io_timeout_seconds": 60,
    "wipe_on_close": False,
    "device_model": None,
    "disk_quota_bytes": None,
    "cluster_tokens": 16,
    "cluster_tokens_max": 32,
    "split_factor": 1.25,
    "pending_tokens": 16,
    "cluster_score": "sum",
    "cluster_update": "adaptive",
    "pool_slack_pages": 2,
    "group_tokens": 4,
    "grouping": "runs",
    "heads": "all",
    "rows": "low_rank",
    "records": "model",
    "rank": 32,
    "summary_dtype": "model",
    "score": "sum",
    "score_columns": None,
    "score_share": 0.2,
    "bound_weight": 1.0,
    "groups_max": 100,
    "pages_max": 200,
    "resident_layers": None,
    "sink_tokens": 4,
    "tail_tokens": 32,
    "replacement": "fifo",
    "select_queries_max": 8,
    "look_ahead": False,
    "true_query_layers": (),
    "exact_layers": (),
    "keeper": "none",
    "keep_tokens": 256,
    "keep_share": "fixed",
    "keep_window": 32,
    "keep_pool": 5,
    "keep_interval": 0,
    "keep_scores": "attended",
    "keep_variance": 0.0,
    "keep_slack": 0.75,
    "keep_ratio": 1.0,
    "keep_count": "bytes",
    "keep_temperatures": (7.774380648611771, 5.407015096778621, 5.527702582901318),
    "keep_preference": (1.0, 1.0),
    "keep_layer_shares": (),
    "keep_layer_least": 0,
    "keep_layer_most": 3.0,
    "keep_heads": (),
    "audit_every": 0,
    "audit_groups": 16,
    "missed_mass_max": None,
    "layout": "sequence",
    "projection_file": None,
    "projection_kind": "query_aware",
}
AUDIT_INTERVAL = 32  # of `missed_mass_max` without `audit_every`
NOT_SOLVABLE = ("heads", "projection_file", "disk_quota_bytes", "checksum", "io_timeout_seconds",
                "wipe_on_close")  # fmt: skip
#: Every field that a file may have, in the order that messages name them.
FIELDS = (*PATHS, "model", "provenance", "table", "version")
# What observed tokens without shares of layers or heads of their own had, without effect.
_IDLE = ("keep_layer_least", "keep_layer_most")


def upgrade(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `SwapConfig` that a file's fields mean.

    Raises
    ------
    ConfigError
        In version 1's words, for what that version refused; of its table as of ``solutions``.
    """
    flat = DEFAULTS | checked({name: value for name, value in fields.items() if name in PATHS})
    base = blocks_of(flat)
    made = {name: value for name, value in fields.items() if name in ("model", "provenance")}
    made |= vars(base)
    rows = fields.get("table", ())
    if isinstance(rows, str) or not isinstance(rows, list | tuple):
        raise ConfigError(f"solutions: must be a list of solutions, got {rows!r}")
    made["solutions"] = [upgrade_row(row, flat, base) for row in rows]
    return made


def upgrade_row(row: Any, flat: Mapping[str, Any], base: Any) -> Solution:
    """A table's row with its settings by their paths; `base` is what `flat` means without it."""
    row = solution_from(row)
    named = dict(row.settings)
    foreign = sorted(set(named) - (set(PATHS) - set(NOT_SOLVABLE)))
    if foreign:
        solvable = ", ".join(name for name in PATHS if name not in NOT_SOLVABLE)
        raise ConfigError(
            f"solutions: a solution must set only {solvable}, got {', '.join(foreign)}"
        )
    try:
        theirs = blocks_of({**flat, **checked(named)})
    except ConfigError as error:
        raise ConfigError(
            f"solutions: batch {row.batch}, context {row.context}: {error}"
        ) from error
    return Solution(row.batch, row.context, tuple(row_settings(base, theirs, named).items()))


def row_settings(base: Any, theirs: Any, named: Iterable[str]) -> dict[str, Any]:
    """What makes `theirs` of the blocks `base`, by its path, and all that a row named."""
    values = settings_of(theirs)
    paths = [PATHS[name] for name in named]
    return difference(base, theirs) | {path: values[path] for path in paths if path in values}


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings`, each of which obeys its own rule, with tuples for lists."""
    made = {}
    for name, value in settings.items():
        words = VALUES.get(name)
        if words is None:
            if isinstance(value, list) and may_be_list(field_of(PATHS[name])):
                value = tuple(value)
            if name != "audit_every" or value != 0 or isinstance(value, bool | float):
                field_of(PATHS[name]).metadata["check"](name, value)
        elif isinstance(next(iter(words)), bool):
            if not isinstance(value, bool):
                raise ConfigError(f"{name}: must be true or false, got {value!r}")
        elif not isinstance(value, str) or value not in words:
            raise ConfigError(f"{name}: must be one of {', '.join(words)}, got {value!r}")
        made[name] = value
    return made


def blocks_of(flat: Mapping[str, Any]) -> SimpleNamespace:
    """The blocks that all of version 1's settings make, each of which obeys its own rule.

    Raises
    ------
    ConfigError
        In version 1's words, for settings that exclude each other.
    """
    made: dict[str, Any] = {name: {} for name in BLOCKS}
    for name, path in PATHS.items():
        block, _, field = path.partition(".")
        if field and path != POLICY:
            words = VALUES.get(name)
            made[block][field] = flat[name] if words is None else words.get(flat[name], flat[name])
    made["retention"] = _retention(flat, made["retention"])
    made["clusters"] = _clusters(flat, made["clusters"])
    made["audit"] = _audit(flat, made["audit"])
    blocks = SimpleNamespace(**{name: block_from(name, fields) for name, fields in made.items()})
    check_constraints(blocks, lambda path, value: _shown(flat, path, value))
    return blocks


def policy_of(flat: Mapping[str, Any]) -> str:
    """The retention policy's name in version 2; ``none``."""
    divides = flat["keep_layer_shares"] or flat["keep_heads"]
    if flat["keeper"] == "observed" and divides:
        return "compresskv"
    return VALUES["keeper"][flat["keeper"]]


def keepers_with(field: str) -> tuple[str, ...]:
    """The keepers whose policies have a field."""
    policies = [name for name, kind in POLICIES.items() if field in kind.__dataclass_fields__]
    if "compresskv" in policies and "snapkv" not in policies:
        policies.append("snapkv")
    words = {name: word for word, name in VALUES["keeper"].items()}
    later = [name for name in policies if name not in words and name != "compresskv"]
    return tuple(word for name, word in words.items() if name in policies) + tuple(later)


def _retention(flat: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any] | None:
    policy = policy_of(flat)
    known = POLICIES[policy].__dataclass_fields__ if policy != "none" else {}
    names = [name for name, path in PATHS.items() if path.startswith("retention.")]
    for name in names[1:]:
        field = PATHS[name].partition(".")[2]
        idle = name == "keep_layer_least" or (name in _IDLE and flat["keeper"] == "observed")
        if field in known or flat[name] == DEFAULTS[name] or idle:
            continue
        if policy == "compresskv" and flat["keeper"] in keepers_with(field):
            own = "keep_layer_shares" if flat["keep_layer_shares"] else "keep_heads"
            raise ConfigError(
                f"{own}: must be left out where {name} is {flat[name]}, since it belongs to "
                f"{DEFAULTS[name]}, got {listed(flat[own])!r}"
            )
        raise _foreign(name, "keeper", flat, keepers_with(field))
    if flat["keep_tokens"] < flat["keep_layer_least"]:
        raise ConfigError(
            f"keep_tokens: must be at least keep_layer_least ({flat['keep_layer_least']}), since "
            f"it is what layers have on average, got {flat['keep_tokens']}"
        )
    if policy == "none":
        return None
    return {"policy": policy, **{n: v for n, v in fields.items() if n in known}}


def _clusters(flat: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any] | None:
    if flat["grouping"] == "clusters":
        return fields
    for name, path in PATHS.items():
        if path.startswith("clusters.") and flat[name] != DEFAULTS[name]:
            raise _foreign(name, "grouping", flat, ("clusters",))
    return None


def _audit(flat: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any] | None:
    if flat["audit_every"] == 0 and flat["missed_mass_max"] is None:
        return None
    return fields | {"interval": flat["audit_every"] or AUDIT_INTERVAL}


def _foreign(name: str, owner: str, flat: Mapping[str, Any], words: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"{name}: must be left out where {owner} is {flat[owner]}, since it belongs to "
        f"{', '.join(words)}, got {listed(flat[name])!r}"
    )


def _shown(flat: Mapping[str, Any], path: str, value: Any) -> tuple[str, Any]:
    """A setting's name and value as version 1 had them."""
    if path == "audit":
        name = "audit_every" if flat["audit_every"] else "missed_mass_max"
        return name, flat[name]
    if path == POLICY and value == "compresskv":
        name = "keep_layer_shares" if flat["keep_layer_shares"] else "keep_heads"
        return name, flat[name]
    name = next(name for name, each in PATHS.items() if each == path)
    words = {new: old for old, new in VALUES.get(name, {}).items()}
    return name, words.get(value, value) if isinstance(value, str) else value
