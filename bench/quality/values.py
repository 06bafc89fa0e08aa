"""Values of a method's settings, as its name says them."""

from __future__ import annotations

from collections.abc import Sequence


def whole(settings: dict[str, str], name: str, otherwise: int) -> int:
    """A whole number."""
    text = settings.get(name, str(otherwise))
    if not text.isdigit():
        raise ValueError(f"{name}: must be a whole number, got {text!r}")
    return int(text)


def number(name: str, text: str) -> float:
    """What stands after the x of a factor."""
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"{name}: must be a number after x, got {text!r}") from error


def one_of(settings: dict[str, str], name: str, known: Sequence[str]) -> str:
    """One of `known`; the first where nothing is said."""
    value = settings.get(name, known[0])
    if value not in known:
        raise ValueError(f"{name}: must be one of {', '.join(known)}, got {value!r}")
    return value
