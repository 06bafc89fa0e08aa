"""The table of linear layers: each format of weights, by rows and kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.pages.caption import LEVELS, NOT_MEASURED, caption, head, line

Result = dict[str, Any]
FIRST = "half_linear"  # what times are compared with
# How often a layer of a model has each shape: gate and up, down, query and output.
TIMES = {"gate": 2, "down": 1, "attention": 2}


def weight_rows(results: list[Result]) -> Iterator[str]:
    """A line a format, a column for each number of rows and each result's kernels."""
    what = (
        "Linear layers of one layer of `1b` (gate, up, down, query, output; 117 MB in bf16): the"
        " least ms, and that over our bf16 layers'. Error: of a layer's result, beside weights in"
        f" fp32. {_conditions(results)}"
    )
    yield caption(what, results, "Lower is better")
    columns = [(result, rows) for result in results for rows in result["layers"]["gate"]]
    names = [f"{LEVELS[result['machine']['simd']]}, rows: {rows}" for result, rows in columns]
    yield from head(["weights", *names, "error"])
    for format_ in results[0]["layers"]["gate"][columns[0][1]]:
        cells = [_cell(result["layers"], rows, format_) for result, rows in columns]
        error = max(each[columns[0][1]][format_]["error"] for each in results[0]["layers"].values())
        yield line([format_, *cells, f"{error:.1%}"])


def _cell(layers: dict[str, Any], rows: str, format_: str) -> str:
    found = {name: layers[name][rows] for name in TIMES}
    if any(format_ not in each for each in found.values()):
        return NOT_MEASURED
    ms, ours = (
        sum(count * found[name][each]["ms_least"] for name, count in TIMES.items())
        for each in (format_, FIRST)
    )
    return f"{ms:.2f}, {ms / ours:.2f}"


def _conditions(results: list[Result]) -> str:
    """Threads, other load, and versions."""
    first = results[0]
    loads = ", ".join(f"{result['machine']['load_average']:.1f}" for result in results)
    named = first["libraries"] | {"torch": first["machine"]["versions"]["torch"]}
    versions = ", ".join(f"{name} {version}" for name, version in sorted(named.items()))
    return f"Threads: {first['threads']}; load of the machine at the end: {loads}. {versions}."
