"""Blocks of settings as nested mappings, as a file has them, and single settings by their path.

A path is ``block.field``, or the name of a block that may be absent: ``retention``, ``clusters``,
``audit``. Overrides of a preset and rows of `SwapConfig.solutions` are mappings of such paths.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from kvswap_torch.config.blocks import (
    Audit,
    Block,
    Clusters,
    Memory,
    Prefetch,
    Selection,
    Storage,
    Summary,
)
from kvswap_torch.config.retention import POLICIES, Retention
from kvswap_torch.errors import ConfigError

__all__ = [
    "BLOCKS",
    "OPTIONAL",
    "PATHS",
    "block_from",
    "changed",
    "default_score",
    "field_of",
    "mapping_of",
    "settings_of",
]

#: Every block, in the order of a file; `Retention` is one class for each policy.
BLOCKS: dict[str, type[Block]] = {
    "summary": Summary,
    "selection": Selection,
    "prefetch": Prefetch,
    "memory": Memory,
    "storage": Storage,
    "retention": Retention,
    "clusters": Clusters,
    "audit": Audit,
}
OPTIONAL = ("retention", "clusters", "audit")
POLICY = "retention.policy"


def _fields(name: str) -> dict[str, dataclasses.Field[Any]]:
    kinds = POLICIES.values() if name == "retention" else (BLOCKS[name],)
    return {item.name: item for kind in kinds for item in dataclasses.fields(kind)}


_FIELDS = {name: _fields(name) for name in BLOCKS}
#: The path of every setting, those of all policies included.
PATHS = tuple(
    path
    for name, fields in _FIELDS.items()
    for path in ((POLICY,) if name == "retention" else ()) + tuple(f"{name}.{f}" for f in fields)
)


def field_of(path: str) -> dataclasses.Field[Any]:
    """The dataclass field of a path; policies that share one have the same rule for it."""
    block, name = path.split(".")
    return _FIELDS[block][name]


def default_score(kind: str) -> str:
    """`selection.score` where it is left out: attention mass, if there is every token's logit."""
    return "mass_sum" if kind == "low_rank" else "logit_sum"


def block_from(name: str, value: Any) -> Block | None:
    """The block of that name from a mapping, or as it is; None where it may be absent."""
    kind = BLOCKS[name]
    if isinstance(value, kind) and (name != "retention" or hasattr(value, "POLICY")):
        return value
    if value is None and name in OPTIONAL:
        return None
    if not isinstance(value, Mapping):
        absent = " or null" if name in OPTIONAL else ""
        raise ConfigError(f"{name}: must be a block of settings{absent}, got {value!r}")
    fields = dict(value)
    if name == "retention":
        kind = _policy(fields.pop("policy", None))
    known = [item.name for item in dataclasses.fields(kind)]
    for field in fields:
        if field not in known:
            raise ConfigError(_unknown(name, kind, field, known, fields[field]))
    return kind(**fields)


def _policy(name: Any) -> type[Retention]:
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigError(f"{POLICY}: must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]


def _unknown(block: str, kind: Any, field: Any, known: list[str], got: Any) -> str:
    owners = [
        name
        for name, policy in POLICIES.items()
        if block == "retention" and field in policy.__dataclass_fields__
    ]
    if owners:
        return (
            f"{block}.{field}: is not an option of policy {kind.POLICY!r} (only of "
            f"{', '.join(owners)}), got {got!r}"
        )
    policy = ["policy"] if block == "retention" else []
    return f"{block}: fields must be among {', '.join(policy + known)}, got {field}"


def mapping_of(config: Any, full: bool = False) -> dict[str, dict[str, Any]]:
    """A config's blocks as mappings; of each field what differs from its default, or all."""
    made: dict[str, dict[str, Any]] = {}
    for name in BLOCKS:
        block = getattr(config, name)
        if block is None:
            continue
        fields = {item.name: getattr(block, item.name) for item in dataclasses.fields(block)}
        if not full:
            defaults = {item.name: item.default for item in dataclasses.fields(block)}
            if name == "selection":
                defaults["score"] = default_score(config.summary.kind)
            fields = {field: value for field, value in fields.items() if value != defaults[field]}
        if name == "retention":
            fields = {"policy": block.POLICY, **fields}
        if fields or name in OPTIONAL:
            made[name] = fields
    return made


def settings_of(config: Any) -> dict[str, Any]:
    """Every setting of the blocks that a config has, by its path."""
    return {
        f"{name}.{field}": value
        for name, fields in mapping_of(config, full=True).items()
        for field, value in fields.items()
    }


def changed(blocks: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`blocks`, mappings of what differs from the defaults, with settings changed by their paths.

    A block that is absent is made where one of its settings is named; another `retention.policy`
    starts from that policy's defaults.

    Raises
    ------
    ConfigError
        For a path that no setting has, or a setting of a retention policy where none is named.
    """
    made = {name: dict(fields) for name, fields in blocks.items()}
    order = {POLICY: 1}
    for path in sorted(changes, key=lambda path: order.get(path, 2 if "." in str(path) else 0)):
        value = changes[path]
        if path in OPTIONAL:
            made.pop(path, None)
            if value is not None:
                whole = block_from(path, value)
                assert whole is not None
                fields = {
                    item.name: getattr(whole, item.name) for item in dataclasses.fields(whole)
                }
                policy = {"policy": whole.POLICY} if isinstance(whole, Retention) else {}
                made[path] = policy | fields
            continue
        if path not in PATHS:
            near = difflib.get_close_matches(str(path), PATHS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{path}: must be a setting's path, such as {PATHS[0]}{hint}")
        block, field = path.split(".")
        if path == POLICY:
            if made.get("retention", {}).get("policy") != value:
                made["retention"] = {"policy": value}
        elif block == "retention" and block not in made:
            raise ConfigError(
                f"{path}: must come with retention.policy (one of {', '.join(POLICIES)}), since "
                f"nothing is retained, got {value!r}"
            )
        else:
            made.setdefault(block, {})[field] = value
    return made


def difference(base: Any, other: Any) -> dict[str, Any]:
    """What `changed` is given to make `other`'s blocks of `base`'s."""
    changes: dict[str, Any] = {}
    ours, theirs = mapping_of(base, full=True), mapping_of(other, full=True)
    for name in BLOCKS:
        if name not in theirs:
            if name in ours:
                changes[name] = None
            continue
        had = ours.get(name)
        if had is None or had.get("policy") != theirs[name].get("policy"):
            had = {}
            fields = mapping_of(other)[name]
            if not fields:
                changes[name] = {}
        else:
            fields = theirs[name]
        changes |= {
            f"{name}.{field}": value
            for field, value in fields.items()
            if field not in had or had[field] != value
        }
    if "summary.kind" in changes:
        changes["selection.score"] = other.selection.score
    return changes
