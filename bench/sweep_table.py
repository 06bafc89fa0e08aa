"""The table of emulated settings: what more groups buy, and what more columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.quality.methods import parse
from bench.quality.report import interval

SCALE_BYTES = 4  # of a row


def row_bytes(columns: int, dtype: str) -> float:
    """Of a token's row in a layer's summary."""
    return columns * {"int8": 1.0, "int4": 0.5}[dtype] + SCALE_BYTES


def sweep_rows(results: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each setting; a row's bytes as a share of a token's K and V in a layer."""
    yield (
        "| model, tokens, documents | columns | a row, of K and V | tokens attended | kept "
        "| KL, answers | same | KL, text | same |"
    )
    yield "|---|" + "---|" * 8
    for result in results:
        for length, part in result["lengths"].items():
            documents = part["methods"]["full"]["documents"]
            title = f"{result['model']}, {int(length):,}, {documents}"
            swept = [
                (parse(name)[1], method)
                for name, method in part["methods"].items()
                if {"rank", "groups"} <= parse(name)[1].keys()
            ]
            swept.sort(key=lambda each: (int(each[0]["rank"]), int(each[0]["groups"])))
            for settings, method in swept:
                yield f"| {title} | {_cells(settings, method, part)} |"
                title = ""


def _cells(settings: dict[str, str], method: dict[str, Any], part: dict[str, Any]) -> str:
    columns, dtype = int(settings["rank"]), settings.get("dtype", "int8")
    told, text = method["tasks"]["asked"], method["tasks"]["language"]
    whole = part["full_bytes"] / part["tokens"] / len(method["ranks"])
    share = whole / row_bytes(columns, dtype)
    cells = [f"{columns} in {dtype}", f"1/{share:.0f}", f"{method['tokens_per_step']:.0f}"]
    cells.append(interval(told["kept"]))
    cells += [f"{each[what][0]:.3f}" for each in (told, text) for what in ("kl", "agree")]
    return " | ".join(cells)
