"""Names of version 1 as keyword arguments and attributes of a `SwapConfig`, for one release.

Delete this module together with the call of `install`, and what presets ask of it.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from kvswap_torch.config import v1
from kvswap_torch.config.engine import WORDS, default_of, flat_settings
from kvswap_torch.config.nested import BLOCKS, default_score, settings_of
from kvswap_torch.config.solution import Solution, solution_from
from kvswap_torch.errors import ConfigError

__all__ = ["install", "is_old"]

_PATHS = v1.PATHS | {"table": "solutions"}
_OF_VERSION_1 = frozenset(v1.PATHS.values())


def install(kind: type) -> None:
    """Has a config's class take the old names."""
    nested: Any = vars(kind)["__init__"]
    places = [item.name for item in dataclasses.fields(kind) if item.init and not item.kw_only]

    @functools.wraps(nested)
    def __init__(self: Any, *args: Any, **fields: Any) -> None:
        by_place = dict(zip(places, args, strict=False))
        if len(args) > len(places) or by_place.keys() & fields.keys():
            return nested(self, *args, **fields)  # which refuses them
        fields |= by_place
        old = {name: fields.pop(name) for name in _PATHS if name in fields}
        if "table" in old:
            fields["solutions"] = old["table"]
        if any(name in v1.PATHS for name in old):
            fields |= _blocks(_bare(kind, fields), old)
        rows = fields.get("solutions", ())
        if isinstance(rows, list | tuple) and any(map(_is_old, rows)):
            fields["solutions"] = [_adopted(_bare(kind, fields), row) for row in rows]
            old |= dict.fromkeys(name for row in rows for name in _settings(row) if name in _PATHS)
        if old:
            _warn(old)
        return nested(self, **fields)

    def __getattr__(self: Any, name: str) -> Any:
        if name not in _PATHS or "summary" not in vars(self):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        _warn((name,))
        return _value(self, name)

    kind.__init__ = __init__  # type: ignore[misc]
    kind.__getattr__ = __getattr__  # type: ignore[attr-defined]


def is_old(name: Any) -> bool:
    """Whether a setting is called as in version 1."""
    return name in v1.PATHS


def _value(config: Any, name: str) -> Any:
    """A setting in version 1's word."""
    block, _, field = _PATHS[name].partition(".")
    if name == "table":
        return config.solutions
    if not field:  # grouping
        return "runs" if config.clusters is None else "clusters"
    found = getattr(config, block)
    field = "POLICY" if field == "policy" else field
    if not hasattr(found, field):
        return default_of(name)
    value = getattr(found, field)
    return WORDS[name][value] if name in WORDS else value


def _warn(names: Iterable[str]) -> None:
    told = ", ".join(f"{name} is {_PATHS[name]}" for name in names)
    warnings.warn(f"SwapConfig: since version 2 {told}", DeprecationWarning, 3)


def _bare(kind: type, fields: Mapping[str, Any]) -> Any:
    """A config of the blocks alone."""
    return kind(**{name: fields[name] for name in BLOCKS if name in fields})


def _blocks(bare: Any, old: Mapping[str, Any]) -> dict[str, Any]:
    """The blocks of `bare` with settings of the old names."""
    later = {n: v for n, v in old.items() if _is_later_word(n, v)}
    given = later | v1.checked({n: v for n, v in old.items() if n in v1.PATHS and n not in later})
    had = flat_settings(bare)
    if "score" not in given and bare.selection.score == default_score(bare.summary.kind):
        kind = v1.VALUES["rows"][given.get("rows", had["rows"])]
        had["score"] = WORDS["score"][default_score(kind)]
    made = v1.blocks_of(had | given)
    for path, value in settings_of(bare).items():
        block, _, field = path.partition(".")
        has = hasattr(getattr(made, block, None), field)
        if has and path not in _OF_VERSION_1:  # it has no old name, and stays as it is
            setattr(made, block, dataclasses.replace(getattr(made, block), **{field: value}))
    return vars(made)


def _is_later_word(name: str, value: Any) -> bool:
    """Whether a setting that was true or false says one of its words of today."""
    return name == "look_ahead" and isinstance(value, str) and value in WORDS[name]


def _settings(row: Any) -> dict[Any, Any]:
    settings = row.settings if isinstance(row, Solution) else row
    if isinstance(row, Mapping):
        settings = row.get("settings")
    return dict(settings) if isinstance(settings, Mapping | tuple) else {}


def _is_old(row: Any) -> bool:
    return any(name in v1.PATHS for name in _settings(row))


def _adopted(bare: Any, row: Any) -> Any:
    """A solution by its paths."""
    if not _is_old(row):
        return row
    row = solution_from(row)
    named = dict(row.settings)
    old = {name: value for name, value in named.items() if name in v1.PATHS}
    others = {name: value for name, value in named.items() if name not in v1.PATHS}
    fixed = {v1.PATHS[name]: old.pop(name) for name in v1.NOT_SOLVABLE if name in old}
    try:
        theirs = type(bare)(**_blocks(bare, old))
    except ConfigError as error:
        raise ConfigError(
            f"solutions: batch {row.batch}, context {row.context}: {error}"
        ) from error
    settings = v1.row_settings(bare, theirs, old) | fixed | others
    return Solution(row.batch, row.context, tuple(settings.items()))
