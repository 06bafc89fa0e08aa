"""Fields that carry their own rule: default, range, meaning and JSON Schema, stated once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, TypeVar

from kvswap_torch.errors import ConfigError

_RANK_MAX = 1 << 16
INT_MAX = (1 << 63) - 1  # what a number of a file may be, in C++ too
T = TypeVar("T", bound=type)


def number(default: int | None, low: int, high: int, doc: str) -> Any:
    """An int from `low` to `high`; None too when that is the default."""

    def check(name: str, value: Any) -> None:
        if value is None and default is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{name}: must be an int from {low} to {high}, got {value!r}")

    schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": high}
    if default is None:
        schema["type"] = ["integer", "null"]
    return _field(default, check, schema, doc)


def share(doc: str) -> Any:
    """A float between 0 and 1, neither of them; or None, the default."""

    def check(name: str, value: Any) -> None:
        if value is not None and not (isinstance(value, float) and 0 < value < 1):
            raise ConfigError(f"{name}: must be a number between 0 and 1, got {value!r}")

    schema = {"type": ["number", "null"], "exclusiveMinimum": 0, "exclusiveMaximum": 1}
    return _field(None, check, schema, doc)


def real(default: float, low: float, high: float, doc: str, optional: bool = False) -> Any:
    """A float from `low` to `high`; None too where it is `optional`."""

    def check(name: str, value: Any) -> None:
        if value is None and optional:
            return
        if not (isinstance(value, float) and low <= value <= high):
            raise ConfigError(f"{name}: must be a float from {low} to {high}, got {value!r}")

    kind = ["number", "null"] if optional else "number"
    schema = {"type": kind, "minimum": low, "maximum": high}
    return _field(default, check, schema, doc)


def reals(default: tuple[float, ...], low: float, high: float, doc: str) -> Any:
    """As many floats from `low` to `high` as the default has."""
    count = len(default)

    def check(name: str, value: Any) -> None:
        good = isinstance(value, tuple) and len(value) == count
        if not good or not all(isinstance(x, float) and low <= x <= high for x in value):
            shown = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"{name}: must be {count} floats from {low} to {high}, got {shown!r}")

    one = {"type": "number", "minimum": low, "maximum": high}
    schema = {"type": "array", "items": one, "minItems": count, "maxItems": count}
    return _field(default, check, schema, doc)


def floats_rule(low: float, high: float, doc: str) -> Any:
    """Any number of floats from `low` to `high`; none by default."""

    def check(name: str, value: Any) -> None:
        good = isinstance(value, tuple) and all(
            isinstance(one, float) and low <= one <= high for one in value
        )
        if not good:
            shown = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"{name}: must be floats from {low} to {high}, got {shown!r}")

    one = {"type": "number", "minimum": low, "maximum": high}
    return _field((), check, {"type": "array", "items": one}, doc)


def boolean(default: bool, doc: str) -> Any:
    """True or False."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise ConfigError(f"{name}: must be true or false, got {value!r}")

    return _field(default, check, {"type": "boolean"}, doc)


def one_of(default: str | None, choices: tuple[str | None, ...], doc: str) -> Any:
    """One of a few words."""

    def check(name: str, value: Any) -> None:
        if not (value is None or isinstance(value, str)) or value not in choices:
            words = ", ".join(str(choice) for choice in choices)
            raise ConfigError(f"{name}: must be one of {words}, got {value!r}")

    return _field(default, check, {"enum": list(choices)}, doc)


def rank_rule(default: int, doc: str) -> Any:
    """A rank, or a tuple with one for each layer."""
    one = {"type": "integer", "minimum": 1, "maximum": _RANK_MAX}
    schema = {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]}
    return _field(default, lambda name, value: checked_rank(value, _RANK_MAX, name), schema, doc)


def file_rule(doc: str) -> Any:
    """A file beside the config or below it, or None."""
    return _field(None, check_beside, {"type": ["string", "null"], "minLength": 1}, doc)


def layers_rule(doc: str, what: str = "numbers of layers") -> Any:
    """`what`, rising; none by default."""

    def check(name: str, value: Any) -> None:
        good = isinstance(value, tuple) and all(
            isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer <= INT_MAX
            for layer in value
        )
        if not good or list(value) != sorted(set(value)):
            shown = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"{name}: must be {what}, rising, got {shown!r}")

    one = {"type": "integer", "minimum": 0, "maximum": INT_MAX}
    return _field((), check, {"type": "array", "items": one, "title": what}, doc)


def checked_rank(rank: Any, width: int, name: str = "summary.rank") -> None:
    """Raises `ConfigError` unless every rank in `rank` lies between 1 and `width`."""
    values = rank if isinstance(rank, tuple) else (rank,)
    good = bool(values) and all(
        isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= width
        for value in values
    )
    if not good:
        shown = list(rank) if isinstance(rank, tuple) else rank
        raise ConfigError(
            f"{name}: must be an int from 1 to {width}, or one for each layer on disk, got "
            f"{shown!r}"
        )


def check_beside(field: str, name: Any) -> None:
    """Raises `ConfigError` unless a file is None, or lies beside the config or below it."""
    if name is None:
        return
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{field}: must be a file name, got {name!r}")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(
            f"{field}: must lie beside the config or in a folder below it, so that the two travel "
            f"together, got {name!r}"
        )


def may_be_list(item: dataclasses.Field[Any]) -> bool:
    """Whether a setting's values are lists in a file, and tuples here."""
    schema = item.metadata.get("schema", {})
    return any(one.get("type") == "array" for one in (schema, *schema.get("anyOf", ())))


def plain(default: Any, doc: str) -> Any:
    """A field whose rule is not a range: the class checks it."""
    if default is dict:
        return dataclasses.field(default_factory=dict, hash=False, metadata={"doc": doc})
    return dataclasses.field(default=default, metadata={"doc": doc})


def _field(
    default: Any, check: Callable[[str, Any], None], schema: dict[str, Any], doc: str
) -> Any:
    return dataclasses.field(
        default=default, metadata={"check": check, "schema": schema, "doc": doc}
    )


def documented(cls: T) -> T:
    """Adds a NumPy-style ``Parameters`` section made of the fields' own words."""
    lines = ["", "", "Parameters", "----------"]
    for item in dataclasses.fields(cls):
        if "doc" in item.metadata:
            default = "" if item.default is dataclasses.MISSING else f", default {item.default!r}"
            lines += [f"{item.name} : {item.type}{default}", f"    {item.metadata['doc']}"]
    cls.__doc__ = (cls.__doc__ or "") + "\n".join(lines) + "\n"
    return cls
