"""A table's caption: machine, date, configuration and which direction is better."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LEVELS = {"AVX3": "AVX-512", "AVX2": "AVX2"}  # by what the kernels were built for
NOT_MEASURED = "not measured"
DOES_NOT_FIT = "does not fit"


def caption(what: str, results: Iterable[dict[str, Any]], direction: str) -> str:
    """In italics, to stand above its table.

    Parameters
    ----------
    what
        What is measured, and the configuration.
    results
        Whose machines and dates are named, each once.
    """
    found = list(results)
    machines = "; ".join(dict.fromkeys(machine(result) for result in found))
    dates = sorted({date(result) for result in found})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"*{what} Machine: {machines}. Date: {when}. {direction}.*\n"


def machine(result: dict[str, Any]) -> str:
    facts = result["machine"]
    level = LEVELS.get(facts.get("simd", ""), "")
    kind = f"{facts['cpu']} with {level}" if level else facts["cpu"]
    return f"{kind}, {facts['cores']} cores, {facts['file_system']}"


def date(result: dict[str, Any]) -> str:
    return result["machine"].get("date") or result["date"]


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def head(columns: Iterable[str]) -> Iterable[str]:
    """A table's first two lines."""
    named = list(columns)
    yield line(named)
    yield "|" + "---|" * len(named)


def share(part: float | None) -> str:
    """``1/13.0``."""
    return "" if part is None else f"1/{1 / part:.1f}"
